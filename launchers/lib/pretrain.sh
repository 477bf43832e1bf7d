# shellcheck shell=bash disable=SC2034,SC2154
# (the files of the library share variables)
# The whole work of a pretraining script: settings, checks, plan, ranks. Sourced by lib.sh.

lt2_refuse_without_data() {
    cat >&2 <<'TEXT'
lt2: no training data is named. These two commands make some; then set DATA_PATH=data/train:
  python data_prep/train_tokenizer.py --input TEXT.jsonl... --output data/tokenizer --vocab-size 32768
  python data_prep/tokenize.py --input TEXT.jsonl... --tokenizer data/tokenizer --output data/train --append-eod
lt2: (any Hugging Face tokenizer folder does instead of the first; LT2_SMOKE=1 makes a small trial run)
TEXT
    exit 2
}

# A launch script's whole work. $1: config, $2: the smoke profile's run folder; the rest: overrides.
lt2_pretrain() {
    local default_config="$1" smoke_dir="$2" config gpus ranks smoke="${LT2_SMOKE:-}" dry="${LT2_DRY_RUN:-}"
    local explicit_config="${LT2_CONFIG:-}" own_data="" facts run_dir num_paths steps split argument resolved
    local lt2_given_config="${LT2_CONFIG:-}" lt2_chain_ids=""
    local -a given
    shift 2
    given=("$@")
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
    resolved="$(lt2_check "$ranks" "$smoke" "$dry" "$@")" || exit $?
    facts="$(lt2_run_facts <<<"$resolved")" || exit 2
    { read -r run_dir && read -r num_paths && read -r steps && read -r split; } <<<"$facts"
    if [[ -z "$dry" && "$(cat "$run_dir/finished" 2>/dev/null || echo 0)" -ge $steps ]]; then
        lt2_say "$run_dir is finished: its $steps steps are done (a larger training.steps goes on)"
        ! lt2_in_slurm || lt2_cancel_followers "$run_dir"
        exit 0
    fi
    if lt2_in_slurm; then
        [[ -n "$dry" ]] || lt2_submit_chain "$run_dir" ${given[@]+"${given[@]}"}
        lt2_rendezvous
        lt2_container_flags "$(realpath -m "$run_dir")"
    fi
    lt2_launch_command "$ranks" "$@"
    if [[ -n "$dry" ]]; then
        lt2_show_plan "$resolved" "$ranks" "$num_paths" "$@"
        return
    fi
    [[ $num_paths -gt 0 ]] || lt2_refuse_without_data
    lt2_device_settings "$gpus" "$split"
    if ! lt2_in_slurm; then
        exec "${lt2_command[@]}"
    fi
    lt2_run_job "$run_dir" "$ranks" "$resolved"
}

# The part of a Slurm job that begins when everything is checked.
lt2_run_job() { # $1: run folder, $2: ranks, $3: resolved config
    local run_dir="$1" before watcher
    LT2_LOG_DIR="$(realpath -m "$run_dir")/logs/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    export LT2_LOG_DIR LT2_STOP_FILE="$run_dir/stop"
    mkdir -p "$LT2_LOG_DIR" || lt2_die 2 "run_dir $run_dir: $LT2_LOG_DIR cannot be made"
    export TORCH_FR_DUMP_TEMP_FILE="$LT2_LOG_DIR/nccl-trace-rank-" # a file a rank
    [[ -z "$lt2_chain_ids" ]] || echo "$lt2_chain_ids" >"$run_dir/logs/chain-$SLURM_JOB_ID"
    printf '%s\n' "$3" >"$LT2_LOG_DIR/config.yaml"
    printf '%q ' "${lt2_command[@]}" >"$LT2_LOG_DIR/command.txt"
    scontrol show job "$SLURM_JOB_ID" >"$LT2_LOG_DIR/job.txt"
    git -C "$LT2_ROOT" describe --always --dirty >"$LT2_LOG_DIR/commit.txt" 2>/dev/null || true
    lt2_check_nodes "$LT2_LOG_DIR"
    lt2_leave_before_the_limit "${LT2_SAVE_SECONDS:-240}"
    lt2_say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $2 ranks, $MASTER_ADDR:$MASTER_PORT, logs in $LT2_LOG_DIR"
    before="$(lt2_newest_checkpoint "$run_dir")"
    lt2_event "$run_dir" start ""
    set +e
    lt2_watch_heartbeat "$run_dir" &
    watcher=$!
    lt2_run_signalled "${lt2_command[@]}"
    kill "$watcher" 2>/dev/null
    lt2_finish_slurm_job "$lt2_status" "$run_dir" "$before"
}

# What NCCL and CUDA are told; the network is left to NCCL. $1: GPUs, $2: tensor x context ranks.
lt2_device_settings() {
    local capability
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
    # The flight recorder: the last collective calls of each rank, written when one of them times out.
    export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
    [[ $1 -gt 0 && $2 -gt 1 && -z "${CUDA_DEVICE_MAX_CONNECTIONS:-}" ]] || return 0
    # Before Blackwell, one queue makes communication start before the kernels that overlap with it.
    capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)"
    [[ ! "$capability" =~ ^[0-9]\. ]] || export CUDA_DEVICE_MAX_CONNECTIONS=1
}

# Checks whatever can be checked without a GPU and prints the resolved config; a mistake is one line on
# stderr and exit code 2. The smoke profile's data may not be there yet in a dry run.
lt2_check() { # $1: ranks, $2: smoke profile, $3: dry run; the rest: arguments
    local -a prefix=() options=(--check --world-size "$1")
    # A job that is started again was checked before.
    [[ "${SLURM_RESTART_COUNT:-0}" == 0 ]] || options=(--print-config)
    [[ "$2" != 1 || -z "$3" ]] || options=(--check-without-data --world-size "$1")
    if [[ -n "${CONTAINER_IMAGE:-}" ]] && lt2_in_slurm; then # the environment is in the container
        lt2_container_flags "$LT2_ROOT"
        prefix=(srun --nodes=1 --ntasks=1 "${lt2_container[@]}")
    fi
    ${prefix[@]+"${prefix[@]}"} python -m megatron_lt2.train "${@:4}" "${options[@]}"
}

# From a resolved config on stdin: run_dir, number of data prefixes, steps, tensor x context ranks.
lt2_run_facts() {
    python -c '
import sys, yaml
config = yaml.safe_load(sys.stdin)
paths = config["data"]["path"]
print(config["run_dir"])
print(1 if isinstance(paths, str) else len(paths))
print(config["training"]["steps"])
print(config["parallel"]["tensor"] * config["parallel"]["context"])'
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

# Reads lt2_pretrain's gpus, smoke and lt2_command.
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
    if [[ "$gpus" == 0 && "$smoke" != 1 ]] && ! lt2_in_slurm; then
        lt2_say "dry run: no GPU here; this plans for $2 GPUs (LT2_NPROC); a real run would be the smoke profile"
    fi
    lt2_say "dry run: nothing was written"
    exit $status
}
