#!/usr/bin/env bash
# Distil Ouro-1.4B into a hybrid of Gated DeltaNet and full attention, in stages (docs/distillation.md).
#
#   TEACHER=imported/ouro_1b4 DATA_PATH=corpus sbatch --gpus-per-node=8 launchers/distill_ouro.sh
#   bash launchers/distill_ouro.sh              on this machine's GPUs; the same command goes on
#   LT2_DRY_RUN=1 bash launchers/distill_ouro.sh   prints the stages, their memory and the command
#
# TEACHER is what `python checkpoints_tools/convert.py import` made of the Hugging Face folder, DATA_PATH token
# files made with its tokenizer, LT2_RUN_DIR the folder of the stages, LT2_CONFIG another file. Arguments are
# settings: --stages.0.tokens 2e8. A job that nears its time limit saves and is requeued.
#SBATCH --job-name=distill_ouro
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
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

lt2_distill "$LT2_ROOT/launchers/configs/distill_ouro_1b4_hybrid.yaml" "$@"
