#!/bin/sh
# Run ci/rebase.sh over all bases in turn, from the oldest series and the recorded resolutions alone, and compare
# what comes out with what is committed, byte for byte.
#
#   ci/replay.sh [--python ..]   needs what ci/test.sh sets up; --python names another environment
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
k3_contracts "$root" replay '--python --python=* --help -h' "$@"
