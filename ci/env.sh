# shellcheck shell=sh
# Virtual environments that the scripts set up for themselves.  Sourced, not run.

# The interpreter to start from: $PYTHON, or the first fit one on PATH.
k3_python() {
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "Error: no Python 3.10 or newer with its venv module: install one, or name it with PYTHON=" >&2
    return 1
}

# k3_venv FOLDER KEY COMMAND..: print FOLDER/bin/python, made first by running COMMAND with that
# interpreter as its last argument.  KEY is what the environment was made for and is written last:
# another key, or a set-up that was killed, makes it anew.
k3_venv() (
    folder=$1 key=$2
    shift 2
    if command -v flock >/dev/null; then
        exec 9>"$folder.lock"
        flock 9
    fi
    if [ "$(cat "$folder/made-for" 2>/dev/null)" != "$key" ]; then
        start=$(k3_python)
        rm -rf "$folder"
        "$start" -m venv "$folder" >&2
        if ! "$@" "$folder/bin/python" >&2; then
            echo "Error: cannot install what is needed: check the network and pip's configuration (messages above)" >&2
            return 1
        fi
        echo "$key" >"$folder/made-for"
    fi
    echo "$folder/bin/python"
)

# k3_key ROOT FILE..: a checksum of the files and of the interpreter's version.
k3_key() {
    (cd "$1" && shift && { cat "$@" && "$(k3_python)" --version; } | cksum | tr ' ' -)
}

k3_install_tools() {
    echo "setting up the tools (once)" >&2
    "$2" -m pip install -qq --disable-pip-version-check -r "$1"
}

# k3_tools ROOT: the interpreter of the build tools' environment.
k3_tools() {
    mkdir -p "$1/build"
    k3_venv "$1/build/tools" "$(k3_key "$1" ci/requirements.txt)" k3_install_tools "$1/ci/requirements.txt"
}

# k3_contracts ROOT COMMAND PATTERNS ARG..: become the tooling's COMMAND with an interpreter that runs contracts,
# that of ci/test.sh.  An ARG that one of PATTERNS matches, --help for instance, does without.
k3_contracts() {
    root=$1 command=$2 patterns=$3
    shift 3
    python=
    set -f
    for argument in "$@"; do
        for pattern in $patterns; do
            # shellcheck disable=SC2254  # it is a pattern
            case $argument in $pattern) python=$(k3_tools "$root") ;; esac
        done
    done
    set +f
    if [ -z "$python" ]; then
        python=$("$root/ci/test.sh" setup)
        set -- "$@" --python "$python"
    fi
    PYTHONPATH=$root/ci exec "$python" -m k3patches "$command" "$@"
}
