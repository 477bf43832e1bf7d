#!/usr/bin/env bash
# The tests that need CUDA GPUs; those that need more GPUs than there are skip themselves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/setup_env.sh

python - <<'P' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("ci/gpu.sh: torch sees no CUDA GPU on this machine")
P
exec python -m pytest -m "gpu or multi_gpu" "$@"
