#!/usr/bin/env bash
# From a fresh clone to generated text, on two CPU cores: environment, corpus (the text that Python
# carries), tokenizer, token files, a small looped hybrid, loss figure, Hugging Face export, text.
#
#   bash launchers/quickstart.sh [--dotted.name value ...]      arguments go to the trainer
#   LT2_RUN_DIR=DIR bash launchers/quickstart.sh                default: runs/quickstart
#
# Run it again and each step says what it reuses; an interrupted training goes on from its last checkpoint.
set -euo pipefail

LT2_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
. "$LT2_ROOT/launchers/lib.sh"

run="${LT2_RUN_DIR:-$LT2_ROOT/runs/quickstart}"
export LT2_RUN_DIR="$run"
# Everything below works offline; a look-up by name would be a mistake, so let it fail at once.
export HF_HUB_OFFLINE=1 HF_MODULES_CACHE="${HF_MODULES_CACHE:-$run/.hf_modules}"
started=$SECONDS

step() { # $1: what it does; the rest: the command
    local begin=$SECONDS code=0
    printf '\n== %s\n' "$1"
    "${@:2}" || code=$?
    if [[ $code == "$LT2_SAVED" ]]; then
        lt2_die "$code" "stopped early and saved; run the same command again to go on"
    elif [[ $code != 0 ]]; then
        lt2_die $((code == 2 ? 2 : 1)) "quickstart: step '$1' failed (exit code $code); its message is above"
    fi
    printf -- '-- %s: %d s\n' "$1" $((SECONDS - begin))
}

ranks="${LT2_NPROC:-2}"
train() {
    # Always the CPU: the figures of this run are comparable from machine to machine.
    LT2_FORCE_CPU=1 CUDA_VISIBLE_DEVICES="" python -m megatron_lt2.tools.spawn --with-parent \
        --nproc "$ranks" -- -m megatron_lt2.train --config "$LT2_ROOT/launchers/configs/quickstart.yaml" \
        --data.path "$(lt2_json_list "$run/data/corpus")" "$@"
}
plot() {
    python -m megatron_lt2.tools.plot_loss --metrics "$run/metrics.jsonl" --output "$run/loss.png" \
        --title "quickstart: looped hybrid, 2 CPU ranks"
}
export_hf() {
    local newest origin
    newest="$(lt2_newest_checkpoint "$run")"
    # An export is current if it is of this checkpoint and of this model code.
    origin="$newest $(cat "$run/checkpoints/$newest/manifest.json" "$LT2_ROOT"/megatron_lt2/{hf,kernels,ops,recurrent}/*.py | cksum)"
    if [[ -f "$run/hf/config.json" && "$(cat "$run/.hf_origin" 2>/dev/null)" == "$origin" ]]; then
        echo "up to date: $run/hf is of $newest"
        return
    fi
    rm -f "$run/.hf_origin"
    python "$LT2_ROOT/checkpoints_tools/convert.py" export --checkpoint "$run/checkpoints" \
        --output "$run/hf" --overwrite && echo "$origin" >"$run/.hf_origin"
}
generate() {
    CUDA_VISIBLE_DEVICES="" python -m megatron_lt2.tools.generate --model "$run/hf" \
        --max-new-tokens 60 --prompt "The module" --prompt "def read_file(path):" \
        --prompt "Return a list of"
}

step "environment" lt2_environment
mkdir -p "$run/data"
step "corpus" lt2_corpus "$run/data"
step "tokenizer" lt2_tokenizer "$run/data"
step "tokenize" lt2_tokenize "$run/data"
step "pretrain on $ranks CPU ranks" train "$@"
step "plot the loss" plot
step "export to Hugging Face" export_hf
step "generate" generate

printf '\n== result (%d s)\n' $((SECONDS - started))
python -m megatron_lt2.tools.plot_loss --metrics "$run/metrics.jsonl" --summary ||
    lt2_die 1 "quickstart: the run has no validation loss"
printf 'run folder        %s\n' "$run"
