#!/usr/bin/env bash
# Pretrain a looped transformer of Ouro's shape (24 full-attention layers, looped 4 times, exit gate).
#
#   sbatch --gpus-per-node=8 launchers/pretrain_ouro_1b4.sh      on Slurm; flags of sbatch win over the lines below
#   bash launchers/pretrain_ouro_1b4.sh                          on this machine's GPUs, or inside `salloc` on its nodes
#   LT2_DRY_RUN=1 bash launchers/pretrain_ouro_1b4.sh            prints config, memory and command; writes nothing
#
# Any setting can be given as an argument (--training.steps 1000) or as a variable:
#   DATA_PATH       prefixes of .bin/.idx pairs, separated by spaces    TOKENIZER     tokenizer folder or file
#   LT2_RUN_DIR     run folder; a second start there resumes            LT2_CONFIG    another YAML file
#   TP PP CP        parallel sizes      MBS GBS  batch sizes            EXTRA_ARGS    more arguments
#   LT2_SMOKE=1/0   force/forbid the trial run                          LT2_ROOT      the checkout, if not found
#   LT2_NPROC       ranks on this machine; default: its GPUs            LT2_<SECTION>__<FIELD>  any setting
#   LT2_CHAIN=N     jobs that wait to go on     LT2_MAX_RETRIES=3       CONTAINER_IMAGE  run the ranks in pyxis
#
# A job that nears its time limit saves, is requeued and goes on: docs/slurm.md, docs/reliability.md.
#SBATCH --job-name=ouro_1b4
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

lt2_pretrain "$LT2_ROOT/launchers/configs/ouro_1b4.yaml" runs/ouro_1b4-smoke "$@"
