#!/bin/sh
# Start a fix: patch, contract and test, as an open edit.  ci/new.sh --help says more.
#
#   ci/new.sh FIX-ID --subject "[Bugfix] What it does" [--base X.Y.Z]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
PYTHONPATH=$root/ci exec "$python" -m k3patches new "$@"
