# shellcheck shell=bash
# What the launch scripts share; sourced by them, with LT2_ROOT set to the checkout.
#
# Settings: defaults < YAML file < environment < command line. The trainer reads the environment as
# LT2_<SECTION>__<FIELD>; lt2_short_names maps the usual short names (TP, MBS, DATA_PATH ...) onto those.
#
# Signals: the batch shell asks the ranks to save and leave by SIGUSR1 and waits. Never SIGTERM to srun:
# it kills the ranks before they can save. Exit code 75 means "saved, go on".

LT2_SAVED=75

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
}

# GPUs this shell may use.
lt2_num_gpus() {
    local visible="${CUDA_VISIBLE_DEVICES-unset}"
    if [[ -n "${LT2_FORCE_CPU:-}" || "$visible" == "" || "$visible" == -1 ]]; then
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
    [[ -z "${TOKENIZER:-}" ]] || lt2_map TOKENIZER LT2_DATA__TOKENIZER "$TOKENIZER"
    if [[ -n "${DATA_PATH:-}" ]]; then
        read -r -a paths <<<"$DATA_PATH"
        lt2_map DATA_PATH LT2_DATA__PATH "$(lt2_json_list "${paths[@]}")"
    fi
}

# Prints the resolved config; a wrong setting is one line on stderr and the trainer's exit code.
lt2_resolved_config() { python -m megatron_lt2.train "$@" --print-config; }

# From a resolved config on stdin: run_dir, the number of data prefixes, the first missing token file.
lt2_run_facts() {
    python -c '
import os, sys, yaml
config = yaml.safe_load(sys.stdin)
paths = config["data"]["path"]
paths = [paths] if isinstance(paths, str) else paths
files = [path + suffix for path in paths for suffix in (".bin", ".idx")]
print(config["run_dir"])
print(len(paths))
print(next((name for name in files if not os.path.isfile(name)), ""))'
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

lt2_refuse_without_data() {
    cat >&2 <<'TEXT'
lt2: no training data is named. These two commands make some; then set DATA_PATH=data/train:
  python data_prep/train_tokenizer.py --input TEXT.jsonl... --output data/tokenizer --vocab-size 32768
  python data_prep/tokenize.py --input TEXT.jsonl... --tokenizer data/tokenizer --output data/train --append-eod
lt2: (any Hugging Face tokenizer folder does instead of the first; LT2_SMOKE=1 makes a small trial run)
TEXT
    exit 2
}

# Whether this shell is inside a Slurm allocation whose ranks srun should start.
lt2_in_slurm() { [[ -n "${SLURM_JOB_ID:-}" && "${LT2_LAUNCHER:-srun}" == srun ]]; }

# Host and port where the ranks meet. No fallback to localhost: each node would then meet itself.
lt2_rendezvous() {
    local -a hosts
    mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
    if [[ ${#hosts[@]} != "${SLURM_JOB_NUM_NODES:-${#hosts[@]}}" || ${#hosts[@]} == 0 ]]; then
        lt2_die 1 "scontrol names ${#hosts[@]} hosts for the ${SLURM_JOB_NUM_NODES:-?} nodes of this job"
    fi
    export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
    # Below the ephemeral range 32768-60999, and different for jobs that share a node.
    export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
}

# Fills the array lt2_command with the launch of `python -m megatron_lt2.train "${@:2}"` on $1 ranks.
# Under srun each task is a rank. USR1 is ignored until the trainer has its handler, because by default
# it would end the rank.
# shellcheck disable=SC2016
lt2_launch_command() {
    local ranks="$1" rank_shell
    shift
    if lt2_in_slurm; then
        rank_shell='trap "" USR1; export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"'
        rank_shell+=' WORLD_SIZE="$SLURM_NTASKS"; exec "$@"'
        # No --kill-on-bad-exit: the first rank to leave with 75 would have the others killed while they
        # finish. --wait ends the step so many seconds after a rank is gone, whatever its code; Slurm
        # may take another 30 to kill ranks that hang in NCCL.
        lt2_command=(srun --kill-on-bad-exit=0 --wait=30 --unbuffered --label)
        [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || lt2_command+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        lt2_command+=(bash -c "$rank_shell" rank python -m megatron_lt2.train "$@")
    elif [[ "${LT2_LAUNCHER:-}" == torchrun ]]; then
        lt2_command=(python -m torch.distributed.run --standalone --nproc-per-node "$ranks"
            -m megatron_lt2.train "$@")
    else
        lt2_command=(python -m megatron_lt2.tools.spawn --nproc "$ranks" -- -m megatron_lt2.train "$@")
    fi
}

# Runs "$@"; USR1 and TERM to this shell become USR1 to it, repeated until it ends. Sets lt2_status.
lt2_run_signalled() {
    local pid repeater="" code signalled=""
    trap 'signalled=yes' USR1 TERM
    "$@" &
    pid=$!
    wait "$pid"
    lt2_status=$?
    # `wait` returns when a trap has run; only a further one gives the command's own code.
    while [[ -n "$signalled" ]]; do
        signalled=""
        kill -USR1 "$pid" 2>/dev/null && lt2_say "asked the ranks to save and leave"
        if [[ -z "$repeater" ]]; then
            # A rank that is still starting up ignores the first one.
            (while sleep 15 && kill -USR1 "$pid"; do :; done) >/dev/null 2>&1 &
            repeater=$!
        fi
        wait "$pid"
        code=$?
        [[ $code == 127 ]] || lt2_status=$code
    done
    [[ -z "$repeater" ]] || kill "$repeater" 2>/dev/null
    trap - USR1 TERM
}

lt2_newest_checkpoint() { cat "$1/checkpoints/latest" 2>/dev/null || echo none; }

# After an srun: done, requeued or failed. $1: exit code, $2: run folder, $3: checkpoint at the start.
lt2_finish_slurm_job() {
    if [[ $1 == 0 ]]; then
        lt2_say "finished; run folder $2"
        exit 0
    elif [[ $1 != "$LT2_SAVED" ]]; then
        lt2_die "$1" "the ranks ended with exit code $1; the first traceback above is the cause"
    elif [[ "$(lt2_newest_checkpoint "$2")" == "$3" ]]; then
        lt2_die "$LT2_SAVED" "left early without a newer checkpoint than $3: not requeued"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        lt2_say "saved $(lt2_newest_checkpoint "$2"); job $SLURM_JOB_ID is requeued and goes on there"
        exit 0
    fi
    lt2_die "$LT2_SAVED" "saved, but the requeue was refused; the same command goes on from there"
}

# A launch script's whole work. $1: config, $2: the smoke profile's run folder; the rest: overrides.
lt2_pretrain() {
    local default_config="$1" smoke_dir="$2" config gpus ranks smoke="${LT2_SMOKE:-}" dry="${LT2_DRY_RUN:-}"
    local explicit_config="${LT2_CONFIG:-}" own_data="" facts run_dir num_paths missing argument resolved
    shift 2
    for argument in "$@"; do
        [[ "$argument" != --config && "$argument" != --config=* ]] || explicit_config=command-line
        [[ "$argument" != --data.path && "$argument" != --data.path=* ]] || own_data=yes
    done
    case "$smoke" in "" | 0 | 1) ;; *) lt2_die 2 "LT2_SMOKE='$smoke' must be 1, 0 or empty" ;; esac
    [[ "$smoke" != 0 ]] || smoke=no
    [[ "$dry" != 0 ]] || dry=""
    [[ -z "$dry" ]] || export PYTHONDONTWRITEBYTECODE=1
    lt2_short_names
    lt2_environment
    gpus="$(lt2_num_gpus)"
    if [[ -z "$smoke" && -z "$dry" && -z "$explicit_config" && $gpus == 0 ]] && ! lt2_in_slurm; then
        smoke=1
        lt2_say "no GPU here: taking the smoke profile (quickstart model, its corpus unless you name data, few steps, CPU)"
    elif [[ "$smoke" == 1 ]]; then
        lt2_say "LT2_SMOKE=1: taking the smoke profile (quickstart model, its corpus unless you name data, few steps)"
    fi

    ranks="$(lt2_num_ranks "$gpus" "$smoke" "$dry")" || exit $?
    config="${LT2_CONFIG:-$default_config}"
    unset LT2_CONFIG
    if [[ "$smoke" == 1 ]]; then
        config="$LT2_ROOT/launchers/configs/quickstart.yaml"
        export LT2_RUN_DIR="${LT2_RUN_DIR:-$smoke_dir}"
        lt2_smoke_settings "$ranks"
        [[ -n "$dry" || -n "$own_data" ]] || lt2_smoke_corpus "$LT2_RUN_DIR/data"
    fi
    # shellcheck disable=SC2086  # EXTRA_ARGS is a line of arguments
    set -- --config "$config" ${EXTRA_ARGS:-} "$@"
    resolved="$(lt2_resolved_config "$@")" || exit $?
    facts="$(lt2_run_facts <<<"$resolved")" || exit 2
    run_dir="$(sed -n 1p <<<"$facts")"
    num_paths="$(sed -n 2p <<<"$facts")"
    missing="$(sed -n 3p <<<"$facts")"
    ! lt2_in_slurm || lt2_rendezvous
    lt2_launch_command "$ranks" "$@"
    if [[ -n "$dry" ]]; then
        lt2_show_plan "$resolved" "$ranks" "$num_paths" "$@"
        return
    fi
    [[ $num_paths -gt 0 ]] || lt2_refuse_without_data
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    if ! lt2_in_slurm; then
        exec "${lt2_command[@]}"
    fi
    lt2_say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $ranks ranks, $MASTER_ADDR:$MASTER_PORT"
    local before
    before="$(lt2_newest_checkpoint "$run_dir")"
    set +e
    lt2_run_signalled "${lt2_command[@]}"
    lt2_finish_slurm_job "$lt2_status" "$run_dir" "$before"
}

# The quickstart's model for a few steps; what the user has set stays.
lt2_smoke_settings() { # $1: ranks
    export LT2_TRAINING__STEPS="${LT2_TRAINING__STEPS:-20}"
    export LT2_OPTIMIZER__WARMUP_STEPS="${LT2_OPTIMIZER__WARMUP_STEPS:-2}"
    export LT2_OPTIMIZER__DECAY_STEPS="${LT2_OPTIMIZER__DECAY_STEPS:-10}"
    export LT2_LOGGING__INTERVAL="${LT2_LOGGING__INTERVAL:-1}"
    if [[ $1 -gt 2 ]]; then # the quickstart's batch is cut for two ranks
        export LT2_TRAINING__MICRO_BATCH_SIZE="${LT2_TRAINING__MICRO_BATCH_SIZE:-2}"
        export LT2_TRAINING__GLOBAL_BATCH_SIZE="${LT2_TRAINING__GLOBAL_BATCH_SIZE:-$((4 * $1))}"
    fi
    if [[ -n "${LT2_DATA__PATH:-}" ]]; then # own data brings its own vocabulary
        export LT2_MODEL__VOCAB_SIZE="${LT2_MODEL__VOCAB_SIZE:-null}"
    fi
    LT2_DATA__PATH="${LT2_DATA__PATH:-$(lt2_json_list "$LT2_RUN_DIR/data/corpus")}"
    export LT2_DATA__PATH
}

lt2_smoke_corpus() { # $1: folder
    [[ "$LT2_DATA__PATH" == "$(lt2_json_list "$1/corpus")" ]] || return 0
    { lt2_corpus "$1" && lt2_tokenizer "$1" && lt2_tokenize "$1"; } ||
        lt2_die 2 "the smoke profile's corpus could not be made; the message is above"
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
        echo "${SLURM_NTASKS:-1}"
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

# Reads lt2_pretrain's gpus, smoke, missing and lt2_command.
lt2_show_plan() { # $1: resolved config, $2: ranks, $3: number of data prefixes; the rest: arguments
    local status=0 word name
    printf '# resolved config\n%s\n\n# memory estimate, %s ranks\n' "$1" "$2"
    python -m megatron_lt2.train "${@:4}" --estimate-memory --world-size "$2" || status=$?
    printf '\n# launch command\n'
    while IFS= read -r name; do # copyable: with the settings that came by environment
        printf '%s=%s ' "$name" "$(lt2_quote "${!name}")"
    done < <(compgen -e | grep -E '^(LT2_RUN_DIR|LT2_[A-Z]+__[A-Z_]+|MASTER_ADDR|MASTER_PORT|PYTHONPATH)$')
    for word in "${lt2_command[@]}"; do
        printf '%s ' "$(lt2_quote "$word")"
    done
    printf '\n\n'
    [[ $3 -gt 0 ]] || lt2_say "dry run: no training data is named yet (DATA_PATH, or --data.path)"
    if [[ -n "$missing" && "$smoke" != 1 ]]; then
        printf 'lt2: data.path: there is no %s\n' "$missing" >&2
        status=2
    fi
    if [[ "$gpus" == 0 && "$smoke" != 1 ]] && ! lt2_in_slurm; then
        lt2_say "dry run: no GPU here; this plans for $2 GPUs (LT2_NPROC); a real run would be the smoke profile"
    fi
    lt2_say "dry run: nothing was written"
    exit $status
}

lt2_quote() { # Shell words stay copyable and readable.
    if [[ "$1" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}
