# shellcheck shell=bash disable=SC2153
# What the launch scripts share; sourced by them, with LT2_ROOT set to the checkout.
#
#   lib.sh           messages, environment, settings by their short names, ranks of this machine
#   lib/slurm.sh     signals, requeues, chains: what happens around srun
#   lib/pretrain.sh  the whole work of a pretraining script
#   lib/distill.sh   that of a distillation
#
# Settings: defaults < YAML file < environment < command line. The trainer reads the environment as
# LT2_<SECTION>__<FIELD>; lt2_short_names maps the usual short names (TP, MBS, DATA_PATH ...) onto those.

lt2_say() { printf 'lt2: %s\n' "$*"; }
lt2_die() { # $1: exit code
    printf 'lt2: %s\n' "${*:2}" >&2
    exit "$1"
}

lt2_environment() {
    # shellcheck source=../ci/setup_env.sh
    . "$LT2_ROOT/ci/setup_env.sh" || exit 1
    # This checkout's code, wherever the environment was built; the caller's folder stays the current one.
    export PYTHONPATH="$LT2_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONUNBUFFERED=1
    # Compiled kernels; on storage that all nodes share, one of them compiles for all.
    [[ -z "${LT2_CACHE_DIR:-}" ]] || LT2_CACHE_DIR="$(realpath -m "$LT2_CACHE_DIR")"
}

# GPUs this shell may use; in a Slurm allocation those of a node, since `salloc` leaves the shell where it was.
lt2_num_gpus() {
    local visible="${CUDA_VISIBLE_DEVICES-unset}" granted="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}"
    if [[ -z "${LT2_FORCE_CPU:-}" && "${granted##*:}" =~ ^[1-9][0-9]*$ ]]; then
        echo "${granted##*:}"
    elif [[ -n "${LT2_FORCE_CPU:-}" || "$visible" == "" || "$visible" == -1 ]]; then
        echo 0
    elif ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then
        echo 0
    elif [[ "$visible" != unset && "$visible" != NoDevFiles ]]; then
        tr ',' '\n' <<<"$visible" | grep -c .
    else
        nvidia-smi -L | grep -c '^GPU '
    fi
}

# The short name $1 sets the trainer's variable $2 to $3; both at once is a mistake unless they agree.
lt2_map() {
    local present="${!2-}"
    if [[ -n "$present" && "$present" != "$3" ]]; then
        lt2_die 2 "$1 and $2 are both set and differ ('$3', '$present'): unset one"
    fi
    export "$2=$3"
}

lt2_map_count() {
    local value="${!1-}"
    [[ -n "$value" ]] || return 0
    [[ "$value" =~ ^[1-9][0-9]*$ ]] || lt2_die 2 "$1='$value' is not a positive whole number"
    lt2_map "$1" "$2" "$value"
}

lt2_json_list() {
    local item out=""
    for item in "$@"; do
        item="${item//\\/\\\\}"
        out+="${out:+,}\"${item//\"/\\\"}\""
    done
    printf '[%s]' "$out"
}

lt2_short_names() {
    local -a paths
    lt2_map_count TP LT2_PARALLEL__TENSOR
    lt2_map_count PP LT2_PARALLEL__PIPELINE
    lt2_map_count CP LT2_PARALLEL__CONTEXT
    lt2_map_count MBS LT2_TRAINING__MICRO_BATCH_SIZE
    lt2_map_count GBS LT2_TRAINING__GLOBAL_BATCH_SIZE
    [[ -z "${SAVE:-}" ]] || lt2_map SAVE LT2_RUN_DIR "$SAVE"
    [[ -z "${LOAD:-}" ]] || lt2_map LOAD LT2_CHECKPOINT__INIT_FROM "$LOAD"
    [[ -z "${TOKENIZER:-}" ]] || lt2_map TOKENIZER LT2_DATA__TOKENIZER "$TOKENIZER"
    if [[ -n "${DATA_PATH:-}" ]]; then
        read -r -a paths <<<"$DATA_PATH"
        lt2_map DATA_PATH LT2_DATA__PATH "$(lt2_json_list "${paths[@]}")"
    fi
}

# One rank a Slurm task, else one a GPU, else LT2_NPROC or two on the CPU. A dry run without a GPU plans
# for LT2_NPROC, or 8: one node of the size that the paper's run used.
lt2_num_ranks() { # $1: GPUs here, $2: smoke profile, $3: dry run
    local tasks="${SLURM_NTASKS_PER_NODE:-}"
    if lt2_in_slurm; then
        tasks="${tasks%%(*}"
        if [[ $1 == 0 && -z "${LT2_FORCE_CPU:-}" && "$2" != 1 ]]; then
            lt2_die 2 "this job has no GPU: submit with --gpus-per-node=8 (LT2_SMOKE=1 tries it on CPUs)"
        elif [[ $1 -gt 1 && "${tasks:-1}" -gt $1 ]]; then
            lt2_die 2 "$tasks tasks a node but $1 GPUs: submit with --ntasks-per-node=$1"
        fi
        if [[ -n "${SLURM_NTASKS:-}" ]]; then
            echo "$SLURM_NTASKS"
        else
            echo $((${SLURM_JOB_NUM_NODES:-1} * ${tasks:-$(($1 > 0 ? $1 : 1))}))
        fi
    elif [[ -n "${LT2_NPROC:-}" ]]; then
        [[ "$LT2_NPROC" =~ ^[1-9][0-9]*$ ]] ||
            lt2_die 2 "LT2_NPROC='$LT2_NPROC' is not a positive whole number"
        echo "$LT2_NPROC"
    elif [[ $1 -gt 0 ]]; then
        echo "$1"
    elif [[ -n "$3" && "$2" != 1 ]]; then
        echo 8
    elif [[ "$(nproc 2>/dev/null || echo 1)" -gt 1 ]]; then
        echo 2
    else
        echo 1
    fi
}

# The quickstart's corpus, tokenizer and token files under $1; each tool says when it is up to date.
lt2_corpus() { python "$LT2_ROOT/data_prep/corpus.py" --output "$1"; }
lt2_tokenizer() {
    python "$LT2_ROOT/data_prep/train_tokenizer.py" --input "$1/corpus.jsonl" \
        --output "$1/tokenizer" --vocab-size 4096
}
lt2_tokenize() {
    python "$LT2_ROOT/data_prep/tokenize.py" --input "$1/corpus.jsonl" --tokenizer "$1/tokenizer" \
        --output "$1/corpus" --append-eod --workers 2
}

lt2_quote() { # Shell words stay copyable and readable.
    if [[ "$1" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}

# shellcheck source=lib/slurm.sh
. "$LT2_ROOT/launchers/lib/slurm.sh"
# shellcheck source=lib/pretrain.sh
. "$LT2_ROOT/launchers/lib/pretrain.sh"
# shellcheck source=lib/distill.sh
. "$LT2_ROOT/launchers/lib/distill.sh"
