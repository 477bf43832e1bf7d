#!/usr/bin/env bash
# The default test suite: CPU, no network, minutes. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh
bash ci/slurm_local/install.sh # the tests in tests/slurm need it; as root only

exec python -m pytest "$@"
