#!/usr/bin/env bash
# Style and syntax: ruff for Python, `bash -n` for the scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

python -m ruff check .
for script in ci/*.sh launchers/*.sh .ci/run; do
    bash -n "$script"
done
echo "lint: clean"
