#!/usr/bin/env bash
# Slurm, munge and nothing else, from Debian's or Ubuntu's own packages; 13 s. A no-op where they are,
# and a line that says why not where this user cannot install packages.
set -uo pipefail

PATH="$PATH:/usr/sbin:/sbin"
missing=""
for tool in munged slurmctld slurmd sbatch; do
    command -v "$tool" >/dev/null || missing+=" $tool"
done
[[ -n "$missing" ]] || exit 0
if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "slurm_local: no$missing here, and only root with apt-get can install them: its tests will be skipped" >&2
    exit 0
fi
echo "slurm_local: installing slurmctld, slurmd, slurm-client and munge" >&2
export DEBIAN_FRONTEND=noninteractive
{
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
} >/dev/null 2>&1 || echo "slurm_local: apt-get could not install them: its tests will be skipped" >&2
exit 0
