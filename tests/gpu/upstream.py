"""Run upstream's own tests of what the series changes on a GPU, with a stock vLLM and with the patched one.

Needs one GPU and no network: tests that want a download fail on both sides.  Both vLLM are installed, each for
Python to find by its folder; the tests are those of the release's sdist, in a folder without its vllm/.

    python tests/gpu/upstream.py --stock stock/site --patched patched/site --tests sdist/tests \
        --patched-tests build/v0.33.0/patched/tests --files files.txt --out results.json

files.txt is what `ci/upstream-tests.sh --base 0.33.0 --list` prints.  With --work, a run that --budget ended goes on
where it was.  Exit code: 0 no test turned, 1 at least one passes on stock alone, 3 time ended the run before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from k3patches.upstream import sides
from k3patches.upstream.sides import Comparison, Limits, Runner, Side

TURNED, CUT = 1, 3
DEVICE = """\
import json, platform, torch, vllm
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
told = {"python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__, "gpu": gpu}
print(json.dumps(told))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    end = time.monotonic() + options.budget if options.budget else float("inf")
    files = options.files.read_text().split()
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as scratch:
        work = (options.work or Path(scratch) / "work").resolve()
        pristine, patched = (
            Side(name, _alone(tests, work / f"{name}-tests"), options.python, [Path(p).resolve() for p in path])
            for name, tests, path in (
                ("pristine", options.tests, options.stock.split(os.pathsep)),
                ("patched", options.patched_tests or options.tests, options.patched.split(os.pathsep)),
            )
        )
        ran_on = {side.name: _told(side) for side in (pristine, patched)}
        runner = Runner(work / "steps", Limits(options.limit, end=end), options.jobs, options.chunk)
        changed = [f for f in files if _differs(pristine.tests / f, patched.tests / f)]
        found = sides.compare(runner, pristine, patched, files, changed)
    for line in sides.summary("upstream's tests", found):
        print(line)
    cut = sorted(found.pristine.cut | found.patched.cut)
    if options.out:
        options.out.write_text(json.dumps(_results(ran_on, files, found, cut), indent=1) + "\n")
    if cut:
        print(f"not done: files of {len(cut)} that were begun or waited when time was over, run it again with --work")
    return TURNED if found.turned else CUT if cut else 0


def _results(ran_on: object, files: Sequence[str], found: Comparison, cut: Sequence[str]) -> dict[str, object]:
    return {
        "ran_on": ran_on,
        "files": len(files),
        "pristine": found.pristine.counts(),
        "patched": found.patched.counts(),
        "turned": {t.test: f"{t.patched.outcome}: {t.patched.error}" for t in found.turned},
        "unsteady": list(found.unsteady),
        "gone": list(found.gone),
        "not_done": list(cut),
    }


def _alone(tests: Path, into: Path) -> Path:
    """The tests in a folder of their own, where no vllm/ lies beside them."""
    if not (into / "tests").is_dir():
        shutil.copytree(tests, into / "tests", symlinks=True)
        # The marks that the tests use.
        if (tests.parent / "pyproject.toml").is_file():
            shutil.copy2(tests.parent / "pyproject.toml", into)
    return into


def _differs(one: Path, other: Path) -> bool:
    return one.is_file() and (not other.is_file() or one.read_bytes() != other.read_bytes())


def _told(side: Side) -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, side.path)), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [side.python, "-c", DEVICE], cwd=side.tests, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{side.python} cannot import vLLM from {os.pathsep.join(map(str, side.path))}: {done.stderr[-2000:]}")
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", required=True, metavar="PATH", help="folder, or several with :, of the stock vLLM")
    parser.add_argument("--patched", required=True, metavar="PATH", help="the same of the patched one")
    parser.add_argument("--tests", required=True, type=Path, metavar="FOLDER", help="tests/ of the release's sdist")
    parser.add_argument("--patched-tests", type=Path, metavar="FOLDER", help="tests/ of the patched tree [--tests]")
    parser.add_argument("--files", required=True, type=Path, help="a file with the paths of the test files, tests/..")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--work", type=Path, help="a folder for logs, and to go on in; remove it for a new run")
    parser.add_argument("--budget", type=float, default=0, metavar="S", help="seconds for all of it [no limit]")
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="seconds for one test [%(default)s]")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time, on one GPU [%(default)s]")
    parser.add_argument("--chunk", type=int, default=6, help="files a process [%(default)s]")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and pytest [this one]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
