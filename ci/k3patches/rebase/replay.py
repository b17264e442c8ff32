"""Run the engine over all bases in turn, from the oldest series alone, and compare with what is committed."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from k3patches import fetch
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.rebase import target as targets
from k3patches.rebase.engine import Options, Rebase


@dataclass(frozen=True)
class Replayed:
    """A base that the engine came to: in how many seconds, and the files that differ from the committed ones."""

    release: str
    seconds: float
    differing: list[str]


def replay(project: Project, scratch: Path, cache: Path, python: str) -> list[Replayed]:
    """Do so in ``scratch``, which is made anew.

    Nothing goes there but the oldest series, the resolutions, the contracts and VERSION.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    oldest, *later = project.releases
    shutil.copy2(project.root / "VERSION", scratch)
    for name in (f"patches/v{oldest}", "patches/resolutions", "tests/contracts"):
        if (project.root / name).is_dir():
            shutil.copytree(project.root / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    copy = Project(scratch)
    options = Options(base=None, cache=cache, python=python)
    rebases = [Rebase(copy, targets.parse(release, None), options) for release in later]
    done = []
    start = time.monotonic()
    # A base waits for the series of the one before, but its source as released does not: the second process's work.
    with ThreadPoolExecutor(1) as ahead:
        looked = [ahead.submit(_look_ahead, rebase) for rebase in rebases]
        try:
            for release, rebase, ready in zip(later, rebases, looked, strict=True):
                click.echo(f"== vLLM {release}", err=True)
                ready.result()
                with rebase.lock():
                    rebase.run(go_on=False)
                differing = [name for part in _parts(release) for name in _differing(part, project.root, scratch)]
                done.append(Replayed(release, time.monotonic() - start, differing))
                start = time.monotonic()
        except BaseException:
            ahead.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _look_ahead(rebase: Rebase) -> None:
    with rebase.lock():
        rebase.look_ahead()


@click.command("replay")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder of downloads. [default: the user's cache]")
@click.option("--python", required=True, help="Interpreter that has torch and vLLM's requirements.")
def replay_command(cache: Path | None, python: str) -> None:
    """Carry the oldest base's series over all later bases, and compare with what is committed.

    It works in build/replay, on a copy of the oldest series, the resolutions and the contracts alone.
    """
    project = Project.find()
    scratch = project.root / "build" / "replay"
    done = replay(project, scratch, cache or fetch.default_cache(), python)
    for one in done:
        told = f"{len(one.differing)} files differ" if one.differing else "as committed"
        click.echo(f"{one.release}: {told}, {one.seconds:.0f} s")
        for name in one.differing:
            click.echo(f"  {name}")
    click.echo(f"{len(done)} releases in {sum(one.seconds for one in done):.0f} s")
    if any(one.differing for one in done):
        raise UserError(
            "the engine does not come to the committed series; its own is in build/replay/patches: record what was "
            "edited since with ci/rebase.sh X.Y.Z --record, or commit the engine's"
        )
    shutil.rmtree(scratch)


def _parts(release: str) -> tuple[str, str]:
    return f"patches/v{release}", f"patches/resolutions/v{release}"


def _differing(part: str, committed: Path, made: Path) -> list[str]:
    contents = [
        {str(p.relative_to(root)): p.read_bytes() for p in (root / part).rglob("*") if p.is_file()}
        for root in (committed, made)
    ]
    names = sorted(contents[0].keys() | contents[1].keys())
    return [name for name in names if contents[0].get(name) != contents[1].get(name)]
