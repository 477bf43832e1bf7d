#!/usr/bin/env bash
# Tokenize many text files as a job array, then put the parts together.
#
#   sbatch --array=0-15 launchers/tokenize.sh OUTPUT --tokenizer DIR --input 'web/*.jsonl.zst' [...]
#   bash launchers/tokenize.sh OUTPUT --tokenizer DIR --input ...       the same here, in one piece
#
# Each element takes a run of neighbouring files, or of lines of a large one, and writes OUTPUT.parts/NNNN; the first submits the
# merge, which waits for all of them and writes OUTPUT.bin, .idx and .manifest.json with the documents in
# the order of the files, as one process would. Started again, finished parts are only checked.
#SBATCH --job-name=lt2_tokenize
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.out

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
output="${1:?the first argument is the prefix of the output}"
shift
count="${SLURM_ARRAY_TASK_COUNT:-1}"
if [[ "${LT2_TOKENIZE_MERGE:-}" == 1 ]]; then
    exec python -m data_prep.merge --output "$output" --parts "$output.parts"
elif [[ $count == 1 ]]; then
    exec python "$LT2_ROOT/data_prep/tokenize.py" --output "$output" "$@"
fi
if [[ "$SLURM_ARRAY_TASK_ID" == "$SLURM_ARRAY_TASK_MIN" ]]; then
    lt2_submit_merge "$output"
fi
part=$(((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN) / ${SLURM_ARRAY_TASK_STEP:-1}))
mkdir -p "$output.parts"
exec python "$LT2_ROOT/data_prep/tokenize.py" --output "$(printf '%s.parts/%04d' "$output" $part)" \
    --part "$part/$count" "$@"
