# shellcheck shell=bash
# Sourced by the other scripts: $root, messages, and virtual environments outside the tree.
#
# An environment has two layers, because several clones share one machine and must never test each other's code:
#   venv-<hash>   what a lock file names, for one python; heavy, made once, holds nothing of this project
#   clone-<hash>  this clone on top of it, a few files: its python sees the first layer, then this clone and no other
# Both are made anew where what they are named for has changed. Nobody needs PYTHONPATH, and `bin/driver-manager` of a clone's layer
# works from any folder and with an empty environment.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

say() { echo "${0##*/}: $*" >&2; }
die() {
    say "$*"
    exit 1
}

if [ -z "${HOME:-}" ]; then # as under some CI runners
    HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
    export HOME=${HOME:-/tmp}
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/driver-manager

# Sets $python to one that is new enough and can make environments; says what to install where there is none.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        python=$(command -v "$candidate" || true)
        [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        python=
    done
    [ -n "$python" ] || die "no python 3.11 or newer found. Install one (Debian: apt-get install python3 python3-venv) or set PYTHON"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments. Install its venv and ensurepip modules (Debian: apt-get install python3-venv)"
    command -v flock >/dev/null 2>&1 || die "flock is missing. Install util-linux"
}

short_hash() { sha256sum | cut -c1-12; }

# locked_env LOCK_FILE: sets $base to an environment with exactly what the lock file names.
locked_env() {
    local lock=$1 about stale
    [ -f "$lock" ] || die "$lock is missing. Make it with scripts/lock"
    about=$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')
    base=$cache/venv-$({ cat "$lock" && echo "$about"; } | short_hash)
    mkdir -p "$cache"
    exec 8>"$base.lock"
    flock 8
    if [ ! -e "$base/complete" ]; then
        say "making $base for ${lock#"$root"/}"
        rm -rf "$base"
        "$python" -m venv "$base" || die "$python -m venv failed. Install python3-venv"
        "$base/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --require-hashes --no-deps -r "$lock" >&2 ||
            die "the packages of ${lock#"$root"/} could not be installed. pip needs a package registry (see its message above, and 'pip config list')"
    fi
    touch "$base/complete"
    find "$cache" -mindepth 2 -maxdepth 2 -path '*/venv-*/complete' -mtime +30 -printf '%h\n' 2>/dev/null |
        while read -r stale; do rm -rf "$stale"; done # of lock files that nobody has used for a month
    exec 8>&-
}

# clone_env: sets $env to this clone's layer on top of $base, and puts its bin folder first in PATH.
clone_env() {
    local wanted stale
    env=$cache/clone-$(printf '%s\n' "$root" "$base" | short_hash)
    wanted=$(short_hash <"$root/pyproject.toml")
    exec 8>"$cache/clones.lock"
    flock 8
    for stale in "$cache"/clone-*; do # of clones and first layers that are gone
        [ -d "$(cat "$stale/root" 2>/dev/null)" ] && [ -d "$(cat "$stale/base" 2>/dev/null)" ] || rm -rf "$stale"
    done
    if [ "$(cat "$env/complete" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$env"
        "$python" -m venv --without-pip "$env" || die "$python -m venv failed. Install python3-venv"
        echo "$root" >"$env/root"
        echo "$base" >"$env/base"
        site_packages "$base" >"$(site_packages "$env")/base.pth"
        if [ -d "$(site_packages "$base")/hatchling" ]; then
            "$base/bin/python" -m pip --python "$env/bin/python" install --quiet --no-input --disable-pip-version-check \
                --no-deps --no-build-isolation --editable "$root" >&2 || die "the project itself could not be installed"
        else # a runtime environment: no build tools, so no console scripts either
            echo "$root" >"$(site_packages "$env")/project.pth"
        fi
        echo "$wanted" >"$env/complete"
    fi
    exec 8>&-
    export PATH=$env/bin:$PATH
    unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
}

site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

test_env() {
    find_python
    locked_env "$root/tests/requirements.txt"
    clone_env
}

runtime_env() {
    find_python
    locked_env "$root/images/requirements.txt"
    clone_env
}
