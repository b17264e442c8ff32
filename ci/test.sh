#!/bin/sh
# Set up everything that the tests need and run all of them.
#
#   ci/test.sh                      everything: linters, series, tooling, wheel, contracts, patches' own tests
#   ci/test.sh setup                only make the environment, .venv
#   ci/test.sh contracts [OPTIONS]  only the contracts of one base, pristine and patched side by side
#
# All bases share one environment, made for the default base: its torch and its requirements. A later release may pin
# another torch (0.33.0: 2.14.0); what would not work with this one fails in the contracts.
# torch comes from pip's configured index: where that serves the CUDA build and the CPU build will
# do, point PIP_EXTRA_INDEX_URL at PyTorch's CPU index.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. ci/env.sh

install_tests() {
    echo "setting up the test environment with torch and vLLM's requirements (once)" >&2
    torch=$(sed -n 's/^torch = "\(.*\)"/\1/p' "$base/base.toml")
    # torch first and pinned: a mere requirement of another package could bring a build for other hardware.
    "$1" -m pip install -qq --disable-pip-version-check "torch==$torch" &&
        "$1" -m pip install -qq --disable-pip-version-check \
            -r ci/requirements.txt -r ci/requirements-test.txt -r "$tree/requirements/common.txt" -r "$tree/requirements/build/cuda.txt" &&
        "$1" -m pip install -qq --disable-pip-version-check --no-deps -e .
}

# quilt is one of the ways to apply a series; where it can't be had, lint says that it left it out.
install_quilt() {
    if [ "${CI-}" = true ] && ! command -v quilt >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends quilt; } >/dev/null 2>&1 ||
            echo "quilt could not be installed: its check will be left out" >&2
    fi
}

heading() {
    printf '\n== %s\n' "$*" >&2
}

release=$(cut -d+ -f1 VERSION)
base=patches/v$release
tree=build/v$release/patched
install_quilt
./build.sh apply >/dev/null
python=$(k3_venv "$root/.venv" "$(k3_key "$root" pyproject.toml ci/requirements.txt ci/requirements-test.txt "$base/base.toml" "$tree"/requirements/common.txt "$tree"/requirements/build/cuda.txt)" install_tests)
tools="$python -m k3patches"

case "${1-}" in
    setup)
        echo "$python"
        exit
        ;;
    contracts)
        exec $tools "$@"
        ;;
    "") ;;
    *)
        echo "Error: ci/test.sh knows setup and contracts, not '$1'" >&2
        exit 2
        ;;
esac

heading "linters"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
.venv/bin/shellcheck -x build.sh ci/*.sh .ci/run

heading "series"
$tools lint --all

heading "status table"
$tools table --current

heading "wheel"
./build.sh

heading "tooling"
"$python" -m pytest -q -rs -p no:cacheprovider -n auto --dist loadfile tests/tooling

heading "end to end: the tiny Kimi-K3, how two bases load it, and what runs and judges engines"
./build.sh apply --base 0.33.0 >/dev/null
"$python" -m pytest -q -rs -p no:cacheprovider -n auto --dist loadfile tests/e2e

heading "models that are not K3, on two bases, beside the release; --bases all, and --thorough, for more"
"$python" -m pytest -q -rs -p no:cacheprovider tests/models

heading "contracts and patches' own tests, all bases, against the committed table"
$tools table --check --thorough
