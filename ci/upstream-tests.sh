#!/bin/sh
# Do upstream's own tests of what the series changes pass with it as they do without?  Writes patches/upstream-tests.json.
#
#   ci/upstream-tests.sh [--base X.Y.Z ..] [--list] [--current]   needs what ci/test.sh sets up; --help says more
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
# What runs no test does without torch.
k3_contracts "$root" upstream-tests '--python --python=* --list --current --help -h' "$@"
