"""Where an edit of a series lies, and what it remembers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from k3patches import base as bases
from k3patches import fetch, files, locks, series
from k3patches.base import Base
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.rebase import publish
from k3patches.rebase.store import Store
from k3patches.series import Patch
from k3patches.source import Sdist

FILE = "edit.json"


@dataclass
class State:
    """An open edit.

    ``patch`` is the file that it was opened at, ``pristine`` the commit that all stands on.  ``later`` are the patches
    set aside, as (file, commit), in order, and ``series`` the sha256 of each file of the series as it was opened.
    ``quilt``: the tree is pristine, with the series in patches/.  ``fix`` is the one that the edit was started for.
    """

    patch: str
    pristine: str
    series: dict[str, str]
    later: list[tuple[str, str]] = field(default_factory=list)
    quilt: bool = False
    fix: str | None = None

    def save(self, folder: Path) -> None:
        files.write_record(folder / FILE, self)


@dataclass(frozen=True)
class Place:
    """The edit of one base: ``folder`` is build/edit/vX.Y.Z, and there is one at a time."""

    project: Project
    release: str
    cache: Path

    @property
    def root(self) -> Path:
        return self.project.root / "build" / "edit"

    @property
    def folder(self) -> Path:
        return self.root / f"v{self.release}"

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def stage(self) -> Path:
        """Where a series is made ready to take the old one's place."""
        return self.root / f"stage-v{self.release}"

    @property
    def contracts(self) -> Path:
        return self.project.root / "tests" / "contracts"

    @cached_property
    def series_dir(self) -> Path:
        return self.project.series_dir(self.release)

    @cached_property
    def base(self) -> Base:
        return bases.load(self.series_dir)

    @cached_property
    def store(self) -> Store:
        return Store(self.root)

    @property
    def patches(self) -> list[Patch]:
        return series.load(self.series_dir)

    def source(self) -> Sdist:
        return Sdist(fetch.fetch(self.base.sdist, self.cache), self.base.sdist.sha256)

    def shown(self, path: Path) -> Path:
        """The path as messages name it."""
        return path.relative_to(self.project.root)

    def command(self, script: str, *options: str) -> str:
        """The command line that a message names."""
        base = [] if self.release == self.project.default_release else ["--base", self.release]
        return " ".join([f"ci/{script}", *base, *options])

    def state(self) -> State:
        """What the open edit remembers; without one, an error."""
        path = self.folder / FILE
        if not path.is_file():
            raise UserError(f"no edit of vLLM {self.release} is open: open one with {self.command('edit.sh', 'NNNN')}")
        try:
            raw = json.loads(path.read_text())
            raw["later"] = [(name, commit) for name, commit in raw["later"]]
            return State(**raw)
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.shown(path)} is damaged: save what you need of {self.shown(self.tree)}, and start anew with "
                f"{self.command('edit.sh', '--abort')}"
            ) from None

    def close(self) -> None:
        """Leave nothing of the edit; a kill in between leaves what the next command sweeps away."""
        gone = self.root / f".v{self.release}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.rename(gone)
        shutil.rmtree(gone)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this base's edit, and finish what a kill interrupted while a series was written."""
        busy = f"another command holds the edit of vLLM {self.release}: wait for it"
        with locks.held(self.root / f".lock-v{self.release}", busy):
            if self.stage.exists():
                with self.project.lock():
                    publish.mend(self.project.root / "patches" / f"v{self.release}", self.stage)
            shutil.rmtree(self.root / f".v{self.release}.gone", ignore_errors=True)
            self.project.series_dir(self.release)
            yield


def find(project: Project, release: str | None, cache: Path) -> Place:
    """The edit that the command line means: that of ``release``, or the one that is open."""
    if release is None:
        opened = sorted(path.parent.name[1:] for path in (project.root / "build" / "edit").glob(f"v*/{FILE}"))
        if len(opened) > 1:
            raise UserError(f"edits of vLLM {', '.join(opened)} are open: name one with --base")
        release = opened[0] if opened else project.default_release
    return Place(project, release, cache)


def digests(folder: Path) -> dict[str, str]:
    """sha256 of each patch of the series in ``folder``, by name, in order."""
    return {patch.name: patch.sha256 for patch in series.load(folder)}
