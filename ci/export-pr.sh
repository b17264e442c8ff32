#!/bin/sh
# Make a patch a branch on upstream's tree, with the text of its pull request.  ci/export-pr.sh --help says more.
#
#   ci/export-pr.sh NNNN [--base X.Y.Z] [--onto GITDIR REF] [--stack]   needs what ci/test.sh sets up
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
k3_contracts "$root" export-pr '--python --python=* --abort --no-runs --help -h' "$@"
