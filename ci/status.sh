#!/bin/sh
# Which fix is native, patched or absent on which release?  Runs all contracts, writes README.md and patches/status.json.
#
#   ci/status.sh [--base X.Y.Z ..] [--check] [--json FILE]   needs what ci/test.sh sets up; --help says more
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
# What runs no contract does without torch.
k3_contracts "$root" table '--python --python=* --current --pages --from --from=* --help -h' "$@"
