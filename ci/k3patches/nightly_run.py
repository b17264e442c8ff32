"""Run the engine for one target, and keep what came out where the publishing step finds it.

The two are apart because the engine runs upstream's code, which must not get near a token that can write.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from packaging.version import Version

from k3patches import nightly_status, nightly_upstream
from k3patches.errors import UserError
from k3patches.nightly_find import BRANCH, Target
from k3patches.project import Project
from k3patches.releases import FINAL

OUTCOME = "outcome.json"
REPORT = "report.md"
FILES = "files"
# How much of a file may come back; a series is some hundred KiB.
LARGEST = 4 << 20


class Result(enum.Enum):
    """How the engine ended; the values are its exit codes."""

    REBASED = 0
    ERROR = 1
    NOTHING = 3
    PERSON = 4
    BROKEN = 5

    @property
    def words(self) -> str:
        return {
            Result.REBASED: "rebased",
            Result.ERROR: "failed",
            Result.NOTHING: "nothing to do",
            Result.PERSON: "needs a person",
            Result.BROKEN: "broken",
        }[self]


@dataclass(frozen=True)
class Outcome:
    """What became of a target.

    ``folder`` holds the report, below :data:`FILES` what the engine wrote, and the status that was measured of it.
    """

    target: Target
    result: Result
    seconds: float
    folder: Path

    @property
    def report(self) -> str:
        path = self.folder / REPORT
        if not path.is_file() or path.is_symlink():
            return "There is no report; the log says more.\n"
        return path.read_text(encoding="utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        """What the engine wrote, by its path in the checkout.

        Whoever made the folder may have run anything, so that a path outside the target's own is an error.
        """
        top = self.folder / FILES
        found = {}
        for path in sorted(top.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            name = path.relative_to(top).as_posix()
            if path.is_symlink() or not path.is_file() or not belongs(name, self.target):
                raise UserError(f"{self.target.label}: {name} is nothing that a rebase may write: look at {top}")
            if path.stat().st_size > LARGEST:
                raise UserError(f"{self.target.label}: {name} is too large for a patch: look at {top}")
            found[name] = path.read_bytes()
        return found


def folders(target: Target) -> tuple[str, str]:
    """Where the engine's result for a release lies in the checkout, and nothing else does."""
    return f"patches/v{target.name}", f"patches/resolutions/v{target.name}"


def belongs(name: str, target: Target) -> bool:
    """Whether the engine's result for a release may hold the file ``name``."""
    folder, _, file = name.rpartition("/")
    return target.is_release and folder in folders(target) and re.fullmatch(r"\w[\w.+-]*", file, re.ASCII) is not None


def run(project: Project, target: Target, out: Path, options: Sequence[str], limit_s: float) -> Outcome:
    """Run ci/rebase.sh for ``target``, and for what it wrote ci/status.sh and ci/upstream-tests.sh.

    Fills ``out/NAME``, which is made anew.  All three take ``options``, and ``limit_s`` together.
    """
    folder = out / target.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    command = [str(project.root / "ci" / "rebase.sh"), *target.arguments, "--report", str(folder), *options]
    result = _result(command, project.root, limit_s)
    if result not in (Result.NOTHING, Result.ERROR) and not (folder / REPORT).is_file():
        # So it ends where a person's edit of an earlier run waits; there is nothing new to tell.
        click.echo(f"{target.label}: the engine left no report", err=True)
        result = Result.ERROR
    if target.is_release and result is Result.REBASED:
        for name in folders(target):
            if (project.root / name).is_dir():
                shutil.copytree(project.root / name, folder / FILES / name, symlinks=True)
        measure = nightly_status.command(project.root, target.name, folder, options)
        # That a cell is broken is for the publishing step to tell; here it matters that there is a table.
        _result(measure, project.root, limit_s - (time.monotonic() - start))
        if not (folder / nightly_status.FILE).is_file():
            click.echo(f"{target.label}: the series is written, but its status could not be measured", err=True)
            result = Result.ERROR
        else:
            tests = nightly_upstream.command(project.root, target.name, folder, options)
            _result(tests, project.root, limit_s - (time.monotonic() - start))
            if not (folder / nightly_upstream.FILE).is_file():
                click.echo(f"{target.label}: the series is written, but upstream's tests could not be run", err=True)
                result = Result.ERROR
    seconds = time.monotonic() - start
    told = {"target": asdict(target), "result": result.name.lower(), "seconds": round(seconds, 1)}
    (folder / OUTCOME).write_text(json.dumps(told, indent=2) + "\n")
    return Outcome(target, result, seconds, folder)


def load(out: Path) -> list[Outcome]:
    """The outcomes that :func:`run` left below ``out``, releases first and in order."""
    found = [_load(path.parent) for path in out.glob(f"*/{OUTCOME}")]
    return sorted(found, key=lambda o: (not o.target.is_release, Version(o.target.name) if o.target.is_release else 0))


def _load(folder: Path) -> Outcome:
    path = folder / OUTCOME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        target = Target(**data["target"])
        outcome = Outcome(target, Result[data["result"].upper()], float(data["seconds"]), folder)
        fit = FINAL.fullmatch(target.name) if target.is_release else target.name == BRANCH
        if not fit or target.name != folder.name:
            raise ValueError(f"no target is called {target.name!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is no outcome of a nightly run ({e}): delete {folder} and rebase again") from None
    return outcome


def _result(command: list[str], cwd: Path, limit_s: float) -> Result:
    # A session of its own, so that the limit ends whatever the engine started as well.
    with subprocess.Popen(command, cwd=cwd, start_new_session=True) as engine:
        try:
            code = engine.wait(limit_s)
        except subprocess.TimeoutExpired:
            click.echo(f"ended after {limit_s / 60:.0f} minutes: {' '.join(command)}", err=True)
            code = 1
        finally:
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGKILL)
    if code in {r.value for r in Result}:
        return Result(code)
    # It had no word of its own to say: out of memory, say.
    how = (
        f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}, which means nothing"
    )
    click.echo(f"ended {how}: {' '.join(command)}", err=True)
    return Result.ERROR
