#!/bin/sh
# Which fix is native, patched or absent on which release?  Runs all contracts, writes README.md and patches/status.json.
#
#   ci/status.sh [--base X.Y.Z ..] [--check] [--json FILE]   needs what ci/test.sh sets up; --help says more
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"

# What runs no contract does without torch.
own_environment=true
for argument in "$@"; do
    case $argument in
        --python | --python=* | --current | --from | --from=* | --help) own_environment=false ;;
    esac
done
if $own_environment; then
    python=$("$root/ci/test.sh" setup)
    set -- "$@" --python "$python"
else
    python=$(k3_tools "$root")
fi
PYTHONPATH=$root/ci exec "$python" -m k3patches table "$@"
