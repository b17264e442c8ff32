#!/bin/sh
# Carry the series to another vLLM: a release, a git ref, or a folder.  ci/rebase.sh --help says more.
#
#   ci/rebase.sh 0.28.0 [--from 0.27.1]   needs what ci/test.sh sets up; --python names another environment
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
k3_contracts "$root" rebase '--python --python=* --abort --help -h' "$@"
