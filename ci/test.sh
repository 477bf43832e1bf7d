#!/usr/bin/env bash
# The project's test command: environment, lint, types, tests. Everything runs even when an earlier
# part fails, so that one run shows all there is to mend. Further arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/setup_env.sh || exit 1

failed=()
for part in lint types unit; do
    printf '\n== ci/%s.sh\n' "$part"
    if [[ $part == unit ]]; then
        bash ci/unit.sh "$@" || failed+=("$part")
    else
        bash "ci/$part.sh" || failed+=("$part")
    fi
done
if ((${#failed[@]})); then
    printf 'ci/test.sh: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
