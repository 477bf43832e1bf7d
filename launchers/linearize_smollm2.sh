#!/usr/bin/env bash
# SmolLM2-135M with linear mixers: every student of docs/distillation.md, one after the other, and the table.
#
#   TEACHER=imported/smollm2_135m DATA_PATH=corpus bash launchers/linearize_smollm2.sh
#
# Started again it goes on where it stopped, in the middle of a stage too. MINUTES=8 saves and leaves with code
# 75 after so long; STUDENTS="kda gla" does only these; LT2_RUN_DIR is the folder of all (runs/smollm2).
# gdn-selected, gdn-uniform and gdn-pure share their first stage and have 20M tokens; the others, without any
# full attention, 6M (EVAL_BATCHES, default 16, of 16 sequences for the table). Arguments are settings for all.
# It uses one GPU.

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
began=$SECONDS
root="${LT2_RUN_DIR:-runs/smollm2}"
config="${LT2_CONFIG:-$LT2_ROOT/launchers/configs/linearize_smollm2_135m_gdn.yaml}"
read -r -a students <<<"${STUDENTS:-gdn-selected gdn-uniform gdn-pure gdn kda gla deltanet retnet mlstm linear}"
mkdir -p "$root"
for student in "${students[@]}"; do
    run="$root/$student" result="$root/$student.json"
    settings=(--student.pattern "${student%-*}" ${TEACHER:+--teacher "$TEACHER"} ${DATA_PATH:+--data.path "$DATA_PATH"})
    case "$student" in
    gdn-selected) ;;
    gdn-uniform | gdn-pure)
        settings+=(--stages.1.select.method uniform)
        [[ "$student" == gdn-uniform ]] || settings+=(--stages.2.pattern gdn)
        mkdir -p "$run/stages" && ln -sfn ../../gdn-selected/stages/00-mixer "$run/stages/00-mixer"
        ;;
    *)
        settings+=(--stages.0.tokens 1.5e6 --stages.1.select.method uniform --stages.2.tokens 4.5e6)
        settings+=(--stages.2.pattern "$student")
        ;;
    esac
    [[ ! -f "$result" ]] || continue
    if [[ -n "${MINUTES:-}" ]]; then
        left="$(awk "BEGIN { print $MINUTES - ($SECONDS - $began) / 60 - 0.5 }")"
        awk "BEGIN { exit $left > 0.5 ? 0 : 1 }" || exit 75
        settings+=(--training.exit_after_minutes "$left")
    fi
    LT2_CONFIG="$config" LT2_RUN_DIR="$run" lt2_distill "$config" "${settings[@]}" "$@" || exit $?
    python "$LT2_ROOT/benchmarks/linearize.py" evaluate --config "$config" --run "$run" --name "$student" \
        --output "$result" --batches "${EVAL_BATCHES:-16}" "${settings[@]}" "$@"
done
python "$LT2_ROOT/benchmarks/linearize.py" table "$root"/*.json | tee "$root/table.md"
