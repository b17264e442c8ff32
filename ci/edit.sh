#!/bin/sh
# Open the series at a patch, as an ordinary git tree.  ci/edit.sh --help says more.
#
#   ci/edit.sh NNNN [--base X.Y.Z]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
PYTHONPATH=$root/ci exec "$python" -m k3patches edit "$@"
