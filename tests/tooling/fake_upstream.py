"""A stand-in for ci/upstream-tests.sh: results as the project itself writes them, without a test that was run.

engine.json of the checkout has, for a release, ``turned``: the tests that turn, or ``None``, where it fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3patches import base as bases
from k3patches import series
from k3patches.project import Project
from k3patches.status import Origin
from k3patches.upstream import results
from k3patches.upstream.command import upstream_tests_command
from k3patches.upstream.results import OUTCOMES, Entry


def install(root: Path) -> None:
    """Put it into a checkout, in the real one's place."""
    script = root / "ci" / "upstream-tests.sh"
    script.write_text(f'#!/bin/sh\nPYTHONPATH=ci exec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    script.chmod(0o755)


def entry(root: Path, release: str, turned: Iterable[str] = ()) -> Entry:
    """What was found of one release, in which all but ``turned`` pass."""
    where = Project(root).series_dir(release)
    counts = dict.fromkeys(OUTCOMES, 0) | {"passed": 3}
    origin = Origin.of_series(bases.load(where), series.load(where))
    return Entry(origin, 1, counts, counts, dict.fromkeys(turned, "failed: AssertionError"))


def text(root: Path, release: str, turned: Iterable[str] = ()) -> str:
    return results.to_json({release: entry(root, release, turned)}, [release])


def main(root: Path, arguments: Sequence[str]) -> int:
    # The real command's options.
    given = upstream_tests_command.make_context("upstream-tests", list(arguments)).params
    [release] = given["chosen"]
    plans = root / "engine.json"
    turned = (json.loads(plans.read_text()) if plans.is_file() else {}).get(release, {}).get("turned", [])
    if turned is None:
        print("Error: a made-up reason", file=sys.stderr)
        return 1
    given["json_file"].write_text(text(root, release, turned))
    return bool(turned)


if __name__ == "__main__":
    sys.exit(main(Path.cwd(), sys.argv[1:]))
