# Sourced by the scripts beside it: where the checkout and its environment are, and whether the latter is up to date.

ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)
ENV_DIR=${VIRTUAL_ENV:-$ROOT/.venv}
ENV_PYTHON=$ENV_DIR/bin/python

# What an environment was set up from: the locks, the project file, the set-up itself, and the folder that the
# editable install points to. $1: cpu or dev.
fingerprint() {
    { echo "$1 $ROOT"; cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup" "$ROOT/requirements/$1.lock"; } | sha256sum
}

up_to_date() {
    [ -x "$ENV_PYTHON" ] && [ "$(cat "$ENV_DIR/.neoproto-$1" 2>/dev/null)" = "$(fingerprint "$1")" ]
}
