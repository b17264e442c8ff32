"""Run the tests that the patches themselves carry, in the patched tree, as upstream would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from k3patches.contracts import ENVIRONMENT
from k3patches.series import Patch
from k3patches.zygote import Pytest

ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "k3patches.cpu_plugin", "-m", "cpu_test")


def files(patches: Sequence[Patch], tree: Path) -> list[str]:
    """The test modules that the series adds or changes."""
    touched = {Path(f) for p in patches for f in p.files}
    tests = (f for f in touched if f.parts[0] == "tests" and f.name.startswith("test_"))
    return sorted(str(f) for f in tests if (tree / f).is_file())


def run(patches: Sequence[Patch], tree: Path, python: str, jobs: str = "auto", output: IO[str] | None = None) -> bool:
    """Run them with ``python`` in ``jobs`` processes and say whether all passed; a series without any passes.

    Without a GPU, these are the tests that upstream marks ``cpu_test``; pytest's closing line
    says how many that leaves out.
    """
    chosen = files(patches, tree)
    if not chosen:
        # Without a name, pytest would run all of upstream's.
        return True
    arguments, env = command(python, tree, jobs)
    done = subprocess.run(
        [*arguments, *chosen], cwd=tree, env=os.environ | env, stdout=output, stderr=output, check=False
    )
    return done.returncode == 0


def forked(patches: Sequence[Patch], tree: Path, pytest: Pytest, output: Path) -> bool:
    """The same in a process that is forked, with the contracts' environment; ``output`` gets what it prints."""
    chosen = files(patches, tree)
    return not chosen or pytest([*ARGUMENTS, *chosen], output, tree) == 0


def command(python: str, tree: Path, jobs: str = "0") -> tuple[list[str], dict[str, str]]:
    """The start of pytest's command line for tests in ``tree``, and what the environment must have."""
    arguments = [python, "-m", "pytest", *ARGUMENTS, "-n", jobs, "--dist", "loadfile"]
    path = os.pathsep.join([str(tree), str(Path(__file__).parents[1])])
    return arguments, {"PYTHONPATH": path, **ENVIRONMENT}
