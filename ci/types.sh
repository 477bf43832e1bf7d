#!/usr/bin/env bash
# Types: mypy over the packages that are installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

python -m mypy
