"""Where things are in a checkout, which bases it has, and the lock on its build folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click
from filelock import FileLock, Timeout
from packaging.version import InvalidVersion, Version

from k3patches.errors import UserError


@dataclass(frozen=True)
class Project:
    """A checkout of the project."""

    root: Path

    @classmethod
    def find(cls) -> Project:
        """The checkout this package belongs to, or the one around the working folder."""
        for start in (Path(__file__).resolve(), Path.cwd()):
            for folder in (start, *start.parents):
                if (folder / "VERSION").is_file() and (folder / "patches").is_dir():
                    return cls(folder)
        raise UserError("this command needs a checkout of the project: run it inside one (status works anywhere)")

    @cached_property
    def _version(self) -> tuple[str, int]:
        text = (self.root / "VERSION").read_text(encoding="utf-8", errors="replace").strip()
        match = re.fullmatch(r"(\d+(?:\.\d+)+)\+k3\.(\d+)", text)
        if not match:
            raise UserError(f"VERSION holds {text!r}: write RELEASE+k3.N, for example 0.27.1+k3.1")
        return match[1], int(match[2])

    @property
    def default_release(self) -> str:
        return self._version[0]

    @property
    def revision(self) -> int:
        """The N of +k3.N, shared by all bases."""
        return self._version[1]

    @property
    def releases(self) -> list[str]:
        """Upstream releases that have a series, oldest first."""
        found = [p.parent.name[1:] for p in (self.root / "patches").glob("v*/base.toml")]
        try:
            return sorted(found, key=Version)
        except InvalidVersion as e:
            raise UserError(f"patches/ holds a folder that is no release: {e}") from None

    def series_dir(self, release: str) -> Path:
        if release not in self.releases:
            raise UserError(f"no series for vLLM {release}: the known bases are {', '.join(self.releases)}")
        return self.root / "patches" / f"v{release}"

    def build_dir(self, release: str) -> Path:
        return self.root / "build" / f"v{release}"

    def patched_tree(self, release: str) -> Path:
        return self.build_dir(release) / "patched"

    def pristine_tree(self, release: str) -> Path:
        return self.build_dir(release) / "pristine"

    @property
    def dist_dir(self) -> Path:
        return self.root / "dist"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the build folder; a second build waits for the first.

        The lock is the operating system's, so a killed build leaves none behind.
        """
        build = self.root / "build"
        build.mkdir(exist_ok=True)
        lock = FileLock(build / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            click.echo(f"another build holds {build}, waiting for it", err=True)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
