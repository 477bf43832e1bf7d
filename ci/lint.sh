#!/usr/bin/env bash
# Style and syntax: ruff for Python, shellcheck for the scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

python -m ruff check .
shellcheck ci/*.sh ci/slurm_local/*.sh launchers/*.sh launchers/lib/*.sh .ci/run
echo "lint: clean"
