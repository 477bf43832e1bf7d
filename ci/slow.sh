#!/usr/bin/env bash
# The tests that take longer: whole runs, control runs. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

exec python -m pytest -m "slow and not gpu and not multi_gpu" "$@"
