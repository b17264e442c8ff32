#!/bin/sh
# Make an exported branch, with what people changed on it, the patch again.  ci/import-pr.sh --help says more.
#
#   ci/import-pr.sh NNNN [--base X.Y.Z] [--from GITDIR]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
PYTHONPATH=$root/ci exec "$python" -m k3patches import-pr "$@"
