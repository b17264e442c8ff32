#!/bin/sh
# Write what ci/edit.sh or ci/new.sh opened back into the series.  ci/refresh.sh --help says more.
#
#   ci/refresh.sh [--amend]   needs what ci/test.sh sets up; --python names another environment
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
k3_contracts "$root" write-back '--python --python=* --abort --no-runs --help -h' "$@"
