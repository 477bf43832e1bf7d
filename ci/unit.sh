#!/usr/bin/env bash
# The default test suite: CPU, no network, minutes. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

exec python -m pytest "$@"
