#!/bin/sh
# What the nightly workflow does, one step a command; each runs by hand as well.
#
#   ci/nightly.sh find       which releases have no series yet, and where vLLM's main is
#   ci/nightly.sh rebase     run ci/rebase.sh for each of them, and keep what came out in build/nightly
#   ci/nightly.sh publish    open or update the pull requests and issues for what lies there, with gh
#
# ci/nightly.sh COMMAND --help says more.  Only publish talks to the host, and --dry-run keeps it from changing any.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
PYTHONPATH=$root/ci exec "$python" -m k3patches.nightly "$@"
