#!/bin/sh
# Carry the series to another vLLM: a release, a git ref, or a folder.  ci/rebase.sh --help says more.
#
#   ci/rebase.sh 0.28.0 [--from 0.27.1]   needs what ci/test.sh sets up; --python names another environment
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"

own_environment=true
for argument in "$@"; do
    case $argument in
        --python | --python=* | --abort | --help | -h) own_environment=false ;;
    esac
done
if $own_environment; then
    python=$("$root/ci/test.sh" setup)
    set -- "$@" --python "$python"
else
    python=$(k3_tools "$root")
fi
PYTHONPATH=$root/ci exec "$python" -m k3patches rebase "$@"
