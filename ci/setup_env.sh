#!/usr/bin/env bash
# The project's Python environment. Run it or source it; sourcing also puts the environment on PATH.
#
#   bash ci/setup_env.sh        builds .venv if it is missing, half built or out of date; else instant
#   . ci/setup_env.sh           the same, then `python` is the environment's
#
#   LT2_VENV=DIR                another folder. One that this script did not build (conda, a container's
#                               environment), or built for another checkout, is used as it is and never
#                               changed.
#   LT2_PYTHON=FILE             the interpreter to build with, instead of looking for one
#
# pip is called as it is configured on this machine (index, proxy, constraints).

lt2_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

lt2_env_say() { printf '%s\n' "environment: $*" >&2; }

# Runs the candidate: a pyenv shim on PATH may exist and still refuse to start, and Debian's python3.12
# without the python3.12-venv package cannot make an environment.
lt2_python_fits() {
    [[ -n "$1" ]] && "$1" -c '
import sys
import ensurepip, venv
sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

lt2_pyenv_pythons() { # $1: 3.12 or 3.13; newest patch release first
    local root
    for root in "${PYENV_ROOT:-}" "$(command -v pyenv >/dev/null 2>&1 && pyenv root 2>/dev/null)" \
        "${HOME:-/root}/.pyenv" /opt/pyenv; do
        [[ -n "$root" && -d "$root/versions" ]] || continue
        find "$root/versions" -mindepth 1 -maxdepth 1 -name "$1.*" 2>/dev/null |
            sort -t. -k3,3 -V -r | sed 's|$|/bin/python|'
    done
}

# Prints a Python >= 3.12 that can make environments. 3.12 first: what the tests run on.
lt2_find_python() {
    local version candidate found
    if [[ -n "${LT2_PYTHON:-}" ]]; then
        if lt2_python_fits "$LT2_PYTHON"; then
            printf '%s\n' "$LT2_PYTHON"
            return 0
        fi
        lt2_env_say "LT2_PYTHON=$LT2_PYTHON is not a Python 3.12 or 3.13 with the venv module."
        return 1
    fi
    for version in 3.12 3.13; do
        while IFS= read -r candidate; do
            if lt2_python_fits "$candidate"; then
                printf '%s\n' "$candidate"
                return 0
            fi
        done < <(command -v "python$version"; lt2_pyenv_pythons "$version")
    done
    for candidate in python3 python; do
        if lt2_python_fits "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        found="$(uv python find 3.12 2>/dev/null)"
        if ! lt2_python_fits "$found"; then
            lt2_env_say "no Python 3.12 here; uv fetches one"
            uv python install 3.12 >&2 && found="$(uv python find --managed-python 3.12 2>/dev/null)"
        fi
        if lt2_python_fits "$found"; then
            printf '%s\n' "$found"
            return 0
        fi
    fi
    lt2_env_say "needs Python 3.12 or 3.13 with its venv module, and none was found (on PATH, in pyenv," \
        "by uv): install one, e.g. 'apt install python3.12 python3.12-venv', 'pyenv install 3.12' or" \
        "'uv python install 3.12', or name one with LT2_PYTHON=/path/to/python3.12."
    return 1
}

# What the environment depends on. The folder counts too: an environment does not survive a move.
lt2_env_stamp() {
    printf '%s\n' "1 $lt2_root $1"
    cksum <"$lt2_root/pyproject.toml"
}

lt2_build_env() { # $1: folder
    local venv="$1" python seconds=$SECONDS free
    if [[ -x "$venv/bin/python" && "$(head -n 1 "$venv/.lt2-stamp" 2>/dev/null)" == \
        "$(lt2_env_stamp "$venv" | head -n 1)" ]]; then
        lt2_env_say "pyproject.toml has changed; updating $venv"
    else
        python="$(lt2_find_python)" || return 1
        free="$(df -Pk "$lt2_root" 2>/dev/null | awk 'NR == 2 { print int($4 / 1048576) }')"
        if [[ -n "$free" && "$free" -lt 8 ]]; then
            lt2_env_say "warning: $free GiB free at $lt2_root; the packages take about 6 GiB"
        fi
        lt2_env_say "building $venv with $("$python" -V 2>&1) ($python): minutes and about 6 GiB, once"
        rm -rf "$venv" || return 1
        mkdir -p "$venv" && : >"$venv/.lt2-built" || return 1
        if ! "$python" -m venv "$venv" >&2; then
            lt2_env_say "'$python -m venv $venv' failed; its message is above."
            return 1
        fi
    fi
    lt2_env_say "installing packages (pip install -e '.[dev,hf]')"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        -e "${lt2_root}[dev,hf]" > >(tee "$venv/.lt2-pip.log" | lt2_show_pip) 2>&1; then
        lt2_env_say "pip could not install the packages (see $venv/.lt2-pip.log); run this again to retry."
        return 1
    fi
    lt2_env_stamp "$venv" >"$venv/.lt2-stamp" # last: without it the environment counts as half built
    lt2_env_say "ready after $((SECONDS - seconds)) s"
}

# pip prints several hundred lines: show the large downloads, the closing steps and errors.
lt2_show_pip() {
    local line large='^ *Downloading .*[0-9][0-9](\.[0-9]+)? [MG]B'
    while IFS= read -r line; do
        case "$line" in
        Installing* | Building* | *ERROR* | *error:*) ;;
        *) [[ "$line" =~ $large ]] || continue ;;
        esac
        printf '  %s\n' "${line:0:140}" >&2
    done
}

lt2_setup_env() {
    local venv="${LT2_VENV:-$lt2_root/.venv}" lock="$lt2_root/.venv.lock"
    case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
    if [[ -x "$venv/bin/python" ]] && { [[ ! -e "$venv/.lt2-built" ]] || lt2_env_is_anothers "$venv"; }; then
        if [[ -z "${LT2_VENV:-}" ]]; then
            lt2_env_say "$venv was not built by ci/setup_env.sh: move it away, or set LT2_VENV=$venv to use it."
            return 1
        fi
        if ! "$venv/bin/python" -c '
import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("torch", "megatron.core", "jsonargparse"))))' 2>/dev/null; then
            lt2_env_say "LT2_VENV=$venv lacks torch, megatron-core or jsonargparse; install" \
                "'${lt2_root}[dev,hf]' into it or unset LT2_VENV."
            return 1
        fi
    elif [[ -e "$venv" && ! -e "$venv/.lt2-built" && -n "$(ls -A "$venv" 2>/dev/null)" ]]; then
        lt2_env_say "$venv exists and is no Python environment; name another folder with LT2_VENV."
        return 1
    elif ! lt2_env_is_ready "$venv"; then
        # Two jobs that start at once build it once. Without flock(1) they are on their own.
        (
            if command -v flock >/dev/null 2>&1 && exec 9>"$lock"; then
                flock -n 9 || { lt2_env_say "another process builds it; waiting"; flock 9; }
            fi
            # Build tools and pip's children must not inherit the lock.
            lt2_env_is_ready "$venv" || lt2_build_env "$venv" 9>&-
        ) || return 1
    fi
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
    unset PYTHONHOME
}

lt2_env_is_ready() { # $1: folder
    [[ -x "$1/bin/python" && -f "$1/.lt2-stamp" ]] &&
        [[ "$(lt2_env_stamp "$1")" == "$(cat "$1/.lt2-stamp")" ]]
}

# Whether LT2_VENV names the environment of another checkout, which may be in use there.
lt2_env_is_anothers() { # $1: folder
    local line
    [[ -n "${LT2_VENV:-}" ]] && line="$(head -n 1 "$1/.lt2-stamp" 2>/dev/null)" &&
        [[ "$line" == *" $1" && "$line" != "1 $lt2_root $1" ]]
}

lt2_setup_env
lt2_status=$?
if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    [[ $lt2_status == 0 ]] && lt2_env_say "$("$VIRTUAL_ENV/bin/python" -V 2>&1) in $VIRTUAL_ENV"
    exit $lt2_status
fi
return $lt2_status
