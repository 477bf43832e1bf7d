# shellcheck shell=bash disable=SC2034,SC2154
# (the files of the library share variables)
# What a launch script does around srun: where the ranks meet, signals, time limit, requeues, chains.
# Sourced by lib.sh.
#
# Signals: the batch shell asks the ranks to save and leave by SIGUSR1 and waits. Never SIGTERM to srun:
# it kills the ranks before they can save. Exit codes of the trainer: 75 saved, go on; 2 a setting is
# wrong; 76 the loss diverged; 77 the run hung; anything else is a failure. docs/reliability.md has them.

LT2_SAVED=75
LT2_HUNG=77

# Whether this shell is inside a Slurm allocation whose ranks srun should start.
lt2_in_slurm() { [[ -n "${SLURM_JOB_ID:-}" && "${LT2_LAUNCHER:-srun}" != spawn ]]; }

# Whether it is a batch script, which Slurm can run again; in `salloc` there is nothing to requeue.
lt2_in_batch() {
    # Not piped into grep -q: that ends early, scontrol may die of it, and pipefail says "no".
    [[ "$(scontrol show job "${SLURM_JOB_ID:-none}" 2>/dev/null)" == *BatchFlag=1* ]]
}

# One element of a job array, or of a chain: the next element goes on, so a requeue would double it.
lt2_has_follower() { [[ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 || -n "${LT2_CHAIN_LEFT:-}" ]]; }

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

# srun's flags for a container of pyxis; nothing without CONTAINER_IMAGE. The batch shell stays outside,
# where scontrol is. Fills the array lt2_container.
lt2_container_flags() { # $1: run folder
    lt2_container=()
    [[ -n "${CONTAINER_IMAGE:-}" ]] || return 0
    local mounts="$LT2_ROOT:$LT2_ROOT,$1:$1${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    if [[ -n "${LT2_CACHE_DIR:-}" ]]; then # without it kernels are compiled anew in every container
        mkdir -p "$LT2_CACHE_DIR" || lt2_die 2 "LT2_CACHE_DIR $LT2_CACHE_DIR cannot be made"
        mounts+=",$LT2_CACHE_DIR:$LT2_CACHE_DIR"
    fi
    lt2_container=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts"
        "--container-workdir=$PWD" --no-container-mount-home)
}

# The node's own part of a rank: its place, its log file, then the trainer. USR1 and USR2 are ignored
# until the trainer has handlers, because by default they would end the rank. Rank 0 also writes to the
# job's own output, through a tee that survives the signals that reach every process of the step.
# shellcheck disable=SC2016
LT2_RANK_SHELL='trap "" USR1 USR2
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
if [[ -n "${LT2_LOG_DIR:-}" && "$RANK" == 0 ]]; then
    exec > >(trap "" TERM INT USR1 USR2; exec tee -a "$LT2_LOG_DIR/rank-0.log") 2>&1
elif [[ -n "${LT2_LOG_DIR:-}" ]]; then
    exec >>"$LT2_LOG_DIR/rank-$RANK.log" 2>&1
fi
exec "$@"'

# shellcheck disable=SC2016
LT2_TORCHRUN_SHELL='trap "" USR1 USR2
exec python -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$LT2_NODE_RANKS" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"'

# Fills the array lt2_command with the launch of `python -m megatron_lt2.train "${@:2}"` on $1 ranks.
lt2_launch_command() {
    local ranks="$1" module="${lt2_module:-megatron_lt2.train}"
    shift
    case "${LT2_LAUNCHER:-srun}" in
    srun | torchrun | spawn) ;;
    *) lt2_die 2 "LT2_LAUNCHER='$LT2_LAUNCHER' must be srun, torchrun or spawn" ;;
    esac
    if lt2_in_slurm; then
        # No --kill-on-bad-exit: the first rank to leave with 75 would have the others killed while they
        # finish. --wait ends the step so many seconds after a rank is gone, whatever its code; Slurm
        # may take another 30 to kill ranks that hang in NCCL.
        lt2_command=(srun --kill-on-bad-exit=0 --wait=30 --unbuffered --label)
        [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || lt2_command+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        [[ "${LT2_LAUNCHER:-}" == torchrun ]] || lt2_command+=("--ntasks=$ranks")
        lt2_command+=(${lt2_container[@]+"${lt2_container[@]}"})
        if [[ "${LT2_LAUNCHER:-}" == torchrun ]]; then
            export LT2_NODE_RANKS=$((ranks / ${SLURM_JOB_NUM_NODES:-1}))
            lt2_command+=(--ntasks-per-node=1 "--ntasks=${SLURM_JOB_NUM_NODES:-1}")
            lt2_command+=(bash -c "$LT2_TORCHRUN_SHELL" node -m "$module" "$@")
        else
            lt2_command+=(bash -c "$LT2_RANK_SHELL" rank python -m "$module" "$@")
        fi
    elif [[ "${LT2_LAUNCHER:-}" == torchrun ]]; then
        lt2_command=(python -m torch.distributed.run --standalone --nproc-per-node "$ranks"
            -m "$module" "$@")
    else
        lt2_command=(python -m megatron_lt2.tools.spawn --nproc "$ranks" -- -m "$module" "$@")
    fi
}

# Runs "$@"; USR1 and TERM to this shell become USR1 to it, repeated until it ends. Sets lt2_status.
# torchrun would die of the signal, so its ranks are asked by a file.
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
        if [[ "${LT2_LAUNCHER:-}" == torchrun ]]; then
            : >"$LT2_STOP_FILE" && lt2_say "asked the ranks to save and leave"
        else
            kill -USR1 "$pid" 2>/dev/null && lt2_say "asked the ranks to save and leave"
            if [[ -z "$repeater" ]]; then
                # A rank that is still starting up ignores the first one.
                (while sleep 15 && kill -USR1 "$pid"; do :; done) >/dev/null 2>&1 &
                repeater=$!
            fi
        fi
        wait "$pid"
        code=$?
        [[ $code == 127 ]] || lt2_status=$code
    done
    [[ -z "$repeater" ]] || kill "$repeater" 2>/dev/null
    trap - USR1 TERM
}

# Every node must see the run folder and have the program, or the ranks there fail in stranger ways.
lt2_check_nodes() { # $1: a folder
    [[ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]] || return 0
    # shellcheck disable=SC2016
    srun --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
        [[ -d "$1" ]] || { echo "lt2: $SLURMD_NODENAME does not see $1: put run_dir on a folder that all nodes share" >&2; exit 2; }
        [[ -f "$2/launchers/lib.sh" ]] || { echo "lt2: $SLURMD_NODENAME does not see $2: put the checkout there too" >&2; exit 2; }
    ' check "$1" "$LT2_ROOT" || exit 2
}

# The second net under USR1: a trainer that has not heard of the time limit leaves by itself shortly
# before it. $1: seconds that the last save may take.
lt2_leave_before_the_limit() {
    local left seconds=0 part days=0
    [[ -z "${LT2_TRAINING__EXIT_AFTER_MINUTES:-}" ]] || return 0
    left="$(squeue -h -j "$SLURM_JOB_ID" -o %L 2>/dev/null)" # [[days-]hours:]minutes:seconds, or a word
    [[ "$left" =~ ^[0-9:-]+$ && "$left" == *:* ]] || return 0
    [[ "$left" != *-* ]] || { days="${left%%-*}" && left="${left#*-}"; }
    while [[ -n "$left" ]]; do
        part="${left%%:*}"
        seconds=$((seconds * 60 + 10#$part))
        [[ "$left" == *:* ]] && left="${left#*:}" || left=""
    done
    seconds=$((seconds + days * 86400 - $1))
    [[ $seconds -lt $1 ]] || export LT2_TRAINING__EXIT_AFTER_MINUTES=$((seconds / 60))
}

# Ends a step whose ranks no longer say that they live: their own watchdogs (training.hang_minutes)
# cannot run where a library holds the interpreter. All print their stacks first. $1: run folder.
lt2_watch_heartbeat() {
    local limit="${LT2_HANG_TIMEOUT:-3600}" now last started
    started="$(date +%s)"
    while sleep $((limit < 120 ? 2 : 30)); do
        now="$(date +%s)"
        last="$(stat -c %Y "$1/heartbeat.json" 2>/dev/null || echo 0)"
        [[ $last -ge $started ]] || last=$started
        [[ $((now - last)) -gt $limit ]] || continue
        lt2_say "no heartbeat for $((now - last)) s (LT2_HANG_TIMEOUT=$limit): asking every rank for its stack, then ending the step"
        : >"$LT2_LOG_DIR/hung"
        scancel -s USR2 "$SLURM_JOB_ID"
        sleep 10
        scancel -s KILL "$SLURM_JOB_ID" 2>/dev/null
        return
    done
}

lt2_newest_checkpoint() { # of a distillation, also how many scores its last selection has
    local stage last="" scores
    for stage in "$1"/stages/*/; do
        [[ ! -d "$stage" ]] || last="${stage%/}"
    done
    if [[ -z "$last" ]]; then
        cat "$1/checkpoints/latest" 2>/dev/null || echo none
    elif [[ -d "$last/scores" ]]; then
        scores=("$last"/scores/*)
        echo "${last##*/}/${#scores[@]}-scores"
    else
        echo "${last##*/}/$(cat "$last/checkpoints/latest" 2>/dev/null || echo none)"
    fi
}

# A line in RUN/events.jsonl. $1: run folder, $2: what happened, $3: exit code or empty.
lt2_event() {
    printf '{"time": %s, "event": "%s", "job": "%s", "start": %s, "code": %s, "checkpoint": "%s"}\n' \
        "$(date +%s)" "$2" "${SLURM_JOB_ID:-}" "${SLURM_RESTART_COUNT:-0}" "${3:-null}" \
        "$(lt2_newest_checkpoint "$1")" >>"$1/events.jsonl" 2>/dev/null || true
}

# The ranks' last words: the failure that came first, then the others' heads.
lt2_show_failures() {
    local file first
    first="$(grep -hoE '^rank [0-9]+ failed at [0-9.]+' "$LT2_LOG_DIR"/rank-*.log 2>/dev/null | sort -k5n | sed -n 1p)" || first=""
    for file in "$LT2_LOG_DIR"/rank-*.log; do
        [[ -n "$first" && -f "$file" ]] || continue
        if grep -qF "$first" "$file"; then
            lt2_say "first failure, from $file:"
            grep -F -A 80 "$first" "$file"
            return
        fi
    done
    for file in "$LT2_LOG_DIR"/rank-*.log; do
        [[ -f "$file" && "$file" != */rank-0.log ]] || continue
        lt2_say "end of $file:"
        tail -n 15 "$file"
    done
}

# Ends the jobs that wait for this one: there is nothing left for them to do, or no hope.
lt2_cancel_followers() { # $1: run folder
    local ids
    ids="$(cat "$1/logs/chain-${LT2_CHAIN_ID:-$SLURM_JOB_ID}" 2>/dev/null)" || return 0
    # shellcheck disable=SC2086
    scancel --state=PENDING $ids 2>/dev/null && lt2_say "cancelled the jobs of the chain that still wait"
    return 0
}

# After an srun: done, requeued or failed. $1: exit code, $2: run folder, $3: checkpoint at the start.
lt2_finish_slurm_job() {
    local code="$1" run="$2" before="$3" newest failures
    newest="$(lt2_newest_checkpoint "$run")"
    if [[ -n "${LT2_LOG_DIR:-}" && -e "$LT2_LOG_DIR/hung" && $code != 0 && $code != "$LT2_SAVED" ]]; then
        code=$LT2_HUNG
    fi
    lt2_event "$run" end "$code"
    case $code in
    0)
        lt2_say "finished; run folder $run"
        lt2_cancel_followers "$run"
        exit 0
        ;;
    "$LT2_SAVED")
        if [[ "$newest" == "$before" ]]; then
            lt2_cancel_followers "$run"
            lt2_die "$code" "left early without a newer checkpoint than $before: not requeued"
        fi
        lt2_go_on "saved $newest" "$code"
        ;;
    2 | 76)
        lt2_cancel_followers "$run"
        lt2_die "$code" "the ranks ended with exit code $code, which another start would not change: not requeued"
        ;;
    esac
    [[ -z "${LT2_LOG_DIR:-}" ]] || lt2_show_failures
    if [[ "$newest" == "$before" ]]; then
        lt2_cancel_followers "$run"
        lt2_die "$code" "the ranks ended with exit code $code and no newer checkpoint than $before: not requeued; the first traceback above is the cause"
    fi
    failures="$(($(cat "$run/logs/failures-$SLURM_JOB_ID" 2>/dev/null || echo 0) + 1))"
    echo "$failures" >"$run/logs/failures-$SLURM_JOB_ID"
    if [[ $failures -gt "${LT2_MAX_RETRIES:-3}" ]]; then
        lt2_cancel_followers "$run"
        lt2_die "$code" "failure $failures of this job, LT2_MAX_RETRIES=${LT2_MAX_RETRIES:-3}: not requeued; the first traceback above is the cause"
    fi
    lt2_go_on "failed with exit code $code after $newest was saved (failure $failures, LT2_MAX_RETRIES=${LT2_MAX_RETRIES:-3})" "$code"
}

# Has the run continued: by the follower that waits, else by a requeue. $1: what is said, $2: exit code.
lt2_go_on() {
    if lt2_has_follower; then
        lt2_say "$1; the next job of the array or chain goes on there"
        [[ $2 == "$LT2_SAVED" ]] || exit "$2"
        exit 0
    elif ! lt2_in_batch; then
        lt2_die "$2" "$1; the same command goes on there"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        lt2_say "$1; job $SLURM_JOB_ID is requeued and goes on there"
        exit 0
    fi
    lt2_die "$2" "$1, but the requeue was refused; go on with: sbatch --dependency=singleton $(lt2_own_script)"
}

# The path and the arguments that sbatch was given.
lt2_own_script() { scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | sed -n 1p; }

# LT2_CHAIN=N: N jobs that start one after another once this one has ended, for sites that refuse
# requeues. They get this job's size; LT2_SBATCH_ARGS adds what else it needs. $1: run folder.
lt2_submit_chain() {
    local count="${LT2_CHAIN:-0}" after="$SLURM_JOB_ID" ids="" script left time_limit
    local -a flags
    shift
    [[ "$count" =~ ^[0-9]+$ ]] || lt2_die 2 "LT2_CHAIN='$count' is not a whole number"
    [[ $count -gt 0 && "${SLURM_RESTART_COUNT:-0}" == 0 ]] || return 0
    lt2_in_batch || lt2_die 2 "LT2_CHAIN=$count needs a batch job; submit with sbatch"
    script="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')"
    while [[ -n "$script" && ! -f "$script" ]]; do # arguments follow the path, which may have spaces
        [[ "$script" == *" "* ]] || lt2_die 1 "LT2_CHAIN: the script of job $SLURM_JOB_ID is no file any more"
        script="${script% *}"
    done
    # Empty where the job has no limit, which is no failure.
    time_limit="$(scontrol show job "$SLURM_JOB_ID" | sed -nE 's/.*TimeLimit=([0-9:-]+).*/\1/p')"
    flags=(--parsable --job-name="$SLURM_JOB_NAME" --partition="$SLURM_JOB_PARTITION"
        --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="${SLURM_NTASKS_PER_NODE%%(*}"
        --chdir="$SLURM_SUBMIT_DIR")
    [[ -z "$time_limit" ]] || flags+=(--time="$time_limit")
    [[ -z "${SLURM_JOB_ACCOUNT:-}" ]] || flags+=(--account="$SLURM_JOB_ACCOUNT")
    [[ -z "${SLURM_JOB_QOS:-}" || "$SLURM_JOB_QOS" == normal ]] || flags+=(--qos="$SLURM_JOB_QOS")
    [[ -z "${SLURM_GPUS_PER_NODE:-}" ]] || flags+=(--gpus-per-node="$SLURM_GPUS_PER_NODE")
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || flags+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    for ((left = count - 1; left >= 0; left--)); do
        # shellcheck disable=SC2086  # LT2_SBATCH_ARGS is a line of arguments
        after="$(env -u SLURM_RESTART_COUNT LT2_ROOT="$LT2_ROOT" LT2_CHAIN=0 LT2_CHAIN_ID="$SLURM_JOB_ID" \
            LT2_CHAIN_LEFT="$([[ $left == 0 ]] || echo "$left")" \
            ${lt2_given_config:+"LT2_CONFIG=$lt2_given_config"} \
            sbatch "${flags[@]}" --dependency="afterany:${after%%;*}" ${LT2_SBATCH_ARGS:-} "$script" "$@")" ||
            lt2_die 1 "LT2_CHAIN: sbatch refused the follower (LT2_SBATCH_ARGS adds arguments)"
        ids+=" ${after%%;*}"
    done
    export LT2_CHAIN_LEFT=$count
    lt2_say "chain: jobs$ids go on when this one has ended"
    lt2_chain_ids="$ids"
}

# The job that merges the parts of a tokenizing array, once all of them are written. $1: the output.
lt2_submit_merge() {
    local script id
    script="$(scontrol show job "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" | sed -n 's/^ *Command=//p' | sed -n 1p)"
    while [[ -n "$script" && ! -f "$script" ]]; do
        [[ "$script" == *" "* ]] || lt2_die 1 "the script of job $SLURM_ARRAY_JOB_ID is no file any more"
        script="${script% *}"
    done
    # shellcheck disable=SC2086  # LT2_SBATCH_ARGS is a line of arguments
    id="$(env -u SLURM_ARRAY_TASK_COUNT -u SLURM_ARRAY_TASK_ID LT2_TOKENIZE_MERGE=1 LT2_ROOT="$LT2_ROOT" \
        sbatch --parsable --partition="$SLURM_JOB_PARTITION" --chdir="$SLURM_SUBMIT_DIR" \
        --job-name="$SLURM_JOB_NAME-merge" --output=%x-%j.out --dependency="afterok:$SLURM_ARRAY_JOB_ID" --kill-on-invalid-dep=yes \
        ${LT2_SBATCH_ARGS:-} "$script" "$1")" || lt2_die 1 "sbatch refused the job that merges the parts"
    lt2_say "job ${id%%;*} merges the parts when all are written"
}
