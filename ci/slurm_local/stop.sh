#!/usr/bin/env bash
# Ends what start.sh started: jobs, daemons (each by its process id, after a look at its command line),
# job processes that escaped their step, the lines in /etc/hosts, the folder.
#
#   bash ci/slurm_local/stop.sh [--dir DIR] [--keep-logs]
set -uo pipefail

dir="${LT2_SLURM_DIR:-${TMPDIR:-/tmp}/lt2-slurm-$(id -u)}" keep=""
while (($#)); do
    case "$1" in
    --dir) dir="$2" && shift ;;
    --keep-logs) keep=yes ;;
    *) echo "slurm_local: unknown option $1 (--dir DIR, --keep-logs)" >&2 && exit 2 ;;
    esac
    shift
done
[[ -e "$dir" ]] || exit 0
if [[ ! -e "$dir/.lt2-slurm" ]]; then
    echo "slurm_local: $dir was not made by start.sh: left alone" >&2
    exit 1
fi
PATH="$PATH:/usr/sbin:/sbin"
export SLURM_CONF="$dir/slurm.conf"

# The process id in file $1, if it still is a process that was started with our folder.
own_pid() {
    local pid
    pid="$(cat "$1" 2>/dev/null)" && [[ -n "$pid" && -r "/proc/$pid/cmdline" ]] || return 1
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -F -- "$dir/" >/dev/null && echo "$pid"
}

# kill -0 would call a zombie alive, and in a container nobody may reap it soon.
alive() {
    case "$(awk '/^State:/ { print $2 }' "/proc/$1/status" 2>/dev/null)" in "" | Z) return 1 ;; esac
}

# TERM to the processes of the files $2..., then KILL after $1 seconds.
end() {
    local tenths=$(($1 * 10)) file pid i
    local -a pids=()
    shift
    for file in "$@"; do
        pid="$(own_pid "$file")" && kill "$pid" 2>/dev/null && pids+=("$pid")
    done
    for pid in ${pids[@]+"${pids[@]}"}; do
        for ((i = 0; i < tenths; i++)); do
            alive "$pid" || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null
    done
}

if own_pid "$dir/run/slurmctld.pid" >/dev/null; then
    mapfile -t jobs < <(timeout 10 squeue -h -o %A 2>/dev/null | sort -u)
    if ((${#jobs[@]})); then
        timeout 10 scancel --full -s KILL "${jobs[@]}" 2>/dev/null
        timeout 10 scancel "${jobs[@]}" 2>/dev/null
    fi
    for ((i = 0; i < 150; i++)); do
        [[ -n "$(timeout 10 squeue -h -o %A 2>/dev/null)" ]] || break
        sleep 0.1
    done
fi
end 5 "$dir"/run/slurmd.*.pid
end 10 "$dir/run/slurmctld.pid"
end 5 "$dir/run/munged.pid"

# Job processes that left their step have this cluster and a job id in their environment, and a
# slurmstepd whose slurmd was killed has the cluster. Not this script and its parents.
parents=" " pid=$$
while [[ "${pid:-0}" -gt 1 ]]; do
    parents+="$pid "
    pid="$(awk '/^PPid:/ { print $2 }' "/proc/$pid/status")"
done
for file in /proc/[0-9]*/environ; do
    pid="${file#/proc/}"
    pid="${pid%/environ}"
    [[ "$parents" != *" $pid "* ]] || continue
    { variables="$(tr '\0' '\n' <"$file")"; } 2>/dev/null || continue
    grep -qxF "SLURM_CONF=$dir/slurm.conf" <<<"$variables" || continue
    grep -q '^SLURM_JOB_ID=' <<<"$variables" || grep -q '^slurmstepd:' "/proc/$pid/cmdline" 2>/dev/null || continue
    echo "slurm_local: ending process $pid, which a job left behind" >&2
    kill -KILL "$pid" 2>/dev/null
done

if [[ -w /etc/hosts ]] && grep -qF "# lt2-slurm $dir" /etc/hosts; then
    hosts="$(grep -vF "# lt2-slurm $dir" /etc/hosts)"
    printf '%s\n' "$hosts" >/etc/hosts # in place: it may be a mount
fi
if [[ -n "$keep" ]]; then
    rm -rf "${dir:?}"/{munge,state,spool,run,dev}
else
    rm -rf "$dir"
fi
