#!/usr/bin/env bash
# The validation loss of a run's newest checkpoint, also while the run goes on.
#
#   sbatch --gpus-per-node=8 launchers/evaluate.sh RUN [--training.eval_batches 200] [--data.path PREFIX]
#   bash launchers/evaluate.sh RUN ...          on this machine's GPUs, or CPU ranks
#
# Prints the loss and adds a line to RUN/evaluations/metrics.jsonl. Takes the run's own settings.
#SBATCH --job-name=lt2_evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --output=%x-%j.out

set -euo pipefail

# sbatch runs a copy of this script from its spool folder, so its own place says nothing there.
candidates=("$(dirname "${BASH_SOURCE[0]}")/.." "${SLURM_SUBMIT_DIR:-.}" "${SLURM_SUBMIT_DIR:-.}/..")
[[ -z "${LT2_ROOT:-}" ]] || candidates=("$LT2_ROOT")
for LT2_ROOT in "${candidates[@]}"; do
    [[ ! -f "$LT2_ROOT/launchers/lib.sh" ]] || break
done
if [[ ! -f "$LT2_ROOT/launchers/lib.sh" ]]; then
    echo "lt2: no checkout at ${candidates[*]}: submit from it, or set LT2_ROOT to it" >&2
    exit 2
fi
LT2_ROOT="$(cd "$LT2_ROOT" && pwd -P)"
. "$LT2_ROOT/launchers/lib.sh"


lt2_environment
run="${1:?the first argument is the run folder}"
shift
[[ -f "$run/config.yaml" ]] || lt2_die 2 "$run: no config.yaml, so no run folder"
ranks="$(lt2_num_ranks "$(lt2_num_gpus)" "${LT2_SMOKE:-}" "")" || exit $?
! lt2_in_slurm || lt2_rendezvous
lt2_container_flags "$(realpath -m "$run")"
lt2_launch_command "$ranks" --config "$run/config.yaml" --run_dir "$run" "$@" --evaluate
exec "${lt2_command[@]}"
