#!/bin/sh
# Build the patched vLLM wheel into dist/.  ./build.sh --help says more.
set -eu
root=$(cd "$(dirname "$0")" && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
case "${1-}" in
    "" | -*) set -- build "$@" ;;
esac
PYTHONPATH=$root/ci exec "$python" -m k3patches "$@"
