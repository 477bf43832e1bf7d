#!/usr/bin/env bash
# A real Slurm with several nodes on this machine, on 127.0.0.1 only, as root or not: munged, slurmctld
# and a slurmd a node. Prints the path of a file to source; takes about a second.
#
#   . "$(bash ci/slurm_local/start.sh)"      then sinfo, sbatch, srun as on a cluster
#   bash ci/slurm_local/stop.sh              ends it and removes its folder
#
#   --dir DIR            its folder; default: $LT2_SLURM_DIR, else lt2-slurm-UID in $TMPDIR
#   --nodes N (4)        --gpus N a node, stand-ins without a device (0)    --prefix NAME (lt2n)
#   --kill-wait S (5)    --slurmd-timeout S (15)    --requeue-delay S (5, the least)   --grace S (20)
#
# Two can run at once with different --dir and --prefix. As root, `hostname` says the node's name in
# every task and the names resolve through /etc/hosts; else set MASTER_ADDR=127.0.0.1.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
dir="${LT2_SLURM_DIR:-${TMPDIR:-/tmp}/lt2-slurm-$(id -u)}"
nodes=4 gpus=0 prefix=lt2n kill_wait=5 slurmd_timeout=15 requeue_delay=5 grace=20 port=26800
PATH="$PATH:/usr/sbin:/sbin"

die() {
    printf 'slurm_local: %s\n' "$*" >&2
    exit 1
}

while (($#)); do
    case "$1" in
    --dir | --nodes | --gpus | --prefix | --kill-wait | --slurmd-timeout | --requeue-delay | --grace)
        name="${1#--}"
        [[ $# -gt 1 ]] || die "$1 needs a value"
        printf -v "${name//-/_}" '%s' "$2"
        shift 2
        ;;
    *) die "unknown option $1; the first lines of ${BASH_SOURCE[0]} list them" ;;
    esac
done
for tool in munged slurmctld slurmd sinfo; do
    command -v "$tool" >/dev/null || die "no $tool here; as root: bash $here/install.sh"
done
case "$dir" in /*) ;; *) dir="$PWD/$dir" ;; esac
[[ ${#dir} -le 80 ]] || die "--dir is too long for the name of a socket: $dir"
[[ "$dir" != *[[:space:]]* ]] || die "--dir must not have a space, Slurm cannot quote one: $dir"
[[ ! -e "$dir" ]] || die "$dir exists; bash $here/stop.sh --dir $dir"

undo() {
    local code=$?
    [[ $code != 0 ]] || return 0
    tail -n 5 "$dir"/log/*.log >&2 || true
    bash "$here/stop.sh" --dir "$dir" >&2 || true
    exit $code
}
trap undo EXIT

in_use() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The first block of ports of which none is taken: a controller, the nodes, then those of srun.
while :; do
    taken=""
    for ((p = port; p <= port + nodes; p++)); do
        ! in_use "$p" || taken=yes
    done
    [[ -n "$taken" ]] || break
    port=$((port + 200))
    [[ $port -lt 30000 ]] || die "no free block of ports below 30000"
done

mkdir -p "$dir"/{munge,state,spool,log,run,dev}
chmod 755 "$dir" "$dir/munge"
: >"$dir/.lt2-slurm" # stop.sh removes only a folder that has this
for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$dir/spool/$prefix$i"
done
(
    umask 077
    head -c 1024 /dev/urandom >"$dir/munge/key"
)

# Slurm wants a device for each GPU; nothing opens these.
gres=""
if [[ $gpus -gt 0 ]]; then
    gres=" Gres=gpu:$gpus"
    for ((i = 0; i < gpus; i++)); do
        mknod "$dir/dev/nvidia$i" c 1 3 2>/dev/null || die "--gpus needs root: mknod is refused"
    done
    chmod 666 "$dir"/dev/*
    numbers="[0-$((gpus - 1))]"
    [[ $gpus -gt 1 ]] || numbers=0
    echo "NodeName=${prefix}[1-$nodes] Name=gpu File=$dir/dev/nvidia$numbers" >"$dir/gres.conf"
fi

conf="$(<"$here/slurm.conf.in")"
fill() { conf="${conf//@$1@/$2}"; }
fill DIR "$dir"
fill USER "$(id -un)"
fill CONTROLLER_PORT "$port"
fill NODE_FIRST $((port + 1))
fill NODE_LAST $((port + nodes))
fill SRUN_FIRST $((port + 60))
fill SRUN_LAST $((port + 199))
fill NODES "$nodes"
fill GRES "$gres"
fill PREFIX "$prefix"
fill KILL_WAIT "$kill_wait"
fill SLURMD_TIMEOUT "$slurmd_timeout"
fill REQUEUE_DELAY "$requeue_delay"
fill GRACE "$grace"
printf '%s\n' "$conf" >"$dir/slurm.conf"
export SLURM_CONF="$dir/slurm.conf"
printf 'export SLURM_CONF=%q LT2_SLURM_DIR=%q\n' "$dir/slurm.conf" "$dir" >"$dir/env.sh"

# Scripts take MASTER_ADDR from a node's name, so the names must resolve.
if [[ -w /etc/hosts ]]; then
    for ((i = 1; i <= nodes; i++)); do
        echo "127.0.0.1 $prefix$i # lt2-slurm $dir"
    done >>/etc/hosts
fi

cd / # the daemons keep no folder busy
munged --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" \
    --log-file="$dir/log/munged.log" --pid-file="$dir/run/munged.pid" \
    --seed-file="$dir/munge/seed" 2>>"$dir/log/stderr.log"
slurmctld -f "$SLURM_CONF" </dev/null >>"$dir/log/stderr.log" 2>&1
for ((i = 1; i <= nodes; i++)); do
    if unshare -u true 2>/dev/null; then # a host name of its own
        # shellcheck disable=SC2016
        unshare -u sh -c 'hostname "$1"; exec slurmd -N "$1" -f "$SLURM_CONF"' sh "$prefix$i"
    else
        slurmd -N "$prefix$i" -f "$SLURM_CONF"
    fi </dev/null >>"$dir/log/stderr.log" 2>&1
done

for ((try = 0; try < 300; try++)); do
    idle="$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | sort -u | wc -l)"
    [[ "$idle" -lt "$nodes" ]] || break
    sleep 0.1
done
[[ "$idle" -ge "$nodes" ]] || die "only $idle of $nodes nodes are idle: $(sinfo -h -N -o '%N %T %E' 2>&1)"
echo "slurm_local: $nodes nodes are idle; end it with: bash $here/stop.sh --dir $dir" >&2
echo "$dir/env.sh"
