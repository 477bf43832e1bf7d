#!/usr/bin/env bash
# Recovery against model size and tokens: mixers x sizes x budgets, one student a task of a job array.
#
#   TEACHERS=imported DATA_PATH=corpus sbatch --array=0-62 --gpus-per-node=1 launchers/linearize_study.sh
#   TEACHERS=imported DATA_PATH=corpus bash launchers/linearize_study.sh     all, one after the other
#   python benchmarks/linearize_study.py runs/study                          the fit and the plot so far
#
# TEACHERS has smollm2_135m, smollm2_360m, smollm2_1b7 (python checkpoints_tools/convert.py import). What is done is
# not done again, and a student goes on where it stopped. MIXERS, SIZES and BUDGETS (tokens) choose the grid; a
# quarter of the tokens aligns mixers. LT2_RUN_DIR is the folder of all. Arguments are settings for every student.
#SBATCH --job-name=linearize_study
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%A_%a.out

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
root="${LT2_RUN_DIR:-runs/study}"
unset LT2_RUN_DIR
number=0
for mixer in ${MIXERS:-gdn kda gla deltanet retnet mlstm linear}; do
    for size in ${SIZES:-135m 360m 1b7}; do
        for budget in ${BUDGETS:-6e6 20e6 60e6}; do
            task=$number name="$mixer-$size-$budget"
            number=$((number + 1))
            [[ -z "${SLURM_ARRAY_TASK_ID:-}" || "$SLURM_ARRAY_TASK_ID" == "$task" ]] || continue
            [[ ! -f "$root/$name.json" ]] || continue
            config="$LT2_ROOT/launchers/configs/linearize_smollm2_${size}_gdn.yaml"
            settings=(--teacher "${TEACHERS:-imported}/smollm2_$size" ${DATA_PATH:+--data.path "$DATA_PATH"})
            settings+=(--student.pattern "$mixer" --stages.1.select.method uniform --stages.2.pattern "$mixer")
            settings+=(--stages.0.tokens "$(lt2_share "$budget" 0.25)" --stages.2.tokens "$(lt2_share "$budget" 0.75)")
            # In a job the ranks' end ends the shell, so that its students are evaluated by the next start.
            [[ -f "$root/$name/stages/02-logits/finished" ]] ||
                LT2_RUN_DIR="$root/$name" TEACHER="" DATA_PATH="" lt2_distill "$config" "${settings[@]}" "$@" || exit $?
            python "$LT2_ROOT/benchmarks/linearize.py" evaluate --config "$config" --run "$root/$name" --name "$name" \
                --output "$root/$name.json" "${settings[@]}" "$@"
        done
    done
done
[[ -n "${SLURM_ARRAY_TASK_ID:-}" ]] || python "$LT2_ROOT/benchmarks/linearize_study.py" "$root"
