#!/usr/bin/env bash
# Export a run's newest checkpoint to a Hugging Face folder.
#
#   sbatch launchers/export.sh RUN OUTPUT [--dtype bf16 ...]      on a CPU node
#   bash launchers/export.sh RUN OUTPUT [...]
#
# Further arguments are those of `checkpoints_tools/convert.py export`.
#SBATCH --job-name=lt2_export
#SBATCH --nodes=1
#SBATCH --ntasks=1
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
output="${2:?the second argument is the folder to write}"
shift 2
[[ -d "$run/checkpoints" ]] || lt2_die 2 "$run: no checkpoints folder, so no run folder"
exec python "$LT2_ROOT/checkpoints_tools/convert.py" export --checkpoint "$run/checkpoints" \
    --output "$output" "$@"
