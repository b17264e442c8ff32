#!/bin/sh
# Publish a revision of the series: a tag, and the wheels of every base for both architectures.
#
#   ci/release.sh check       clean tree, status table, upstream's tests, changelog, lint
#   ci/release.sh build       that, and the wheels, bills of materials and checksums in build/release
#   ci/release.sh publish     say what would be tagged and uploaded; with --yes, do it
#
# ci/release.sh COMMAND --help says more.  Only publish --yes talks to the host.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/ci/env.sh"
python=$(k3_tools "$root")
PYTHONPATH=$root/ci exec "$python" -m k3patches.ship "$@"
