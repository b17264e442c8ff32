"""What exports and imports of one base share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from k3patches import base as bases
from k3patches import locks, series
from k3patches.errors import UserError
from k3patches.pr import upstream as upstreams
from k3patches.pr.carrier import Carrier
from k3patches.pr.upstream import Upstream
from k3patches.project import Project
from k3patches.rebase import gitwork, publish
from k3patches.rebase.bench import Bench
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.progress import Progress
from k3patches.rebase.store import Store
from k3patches.series import Patch
from k3patches.status_run import interpreter


@dataclass(frozen=True)
class Options:
    """What the command line says; ``onto`` are a repository and a ref in it.

    ``also`` names patches that are to be below, whether the exported one declares that it depends on them or not.
    """

    cache: Path
    python: str
    onto: tuple[Path, str] | None = None
    branch: str | None = None
    stacked: bool = False
    also: tuple[str, ...] = ()
    run: bool = True


@dataclass
class Desk:
    """A base's series with all that exports and imports of it share; a ``trial`` has results of its own."""

    project: Project
    release: str
    options: Options
    trial: bool = False
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = self.project.root / "build" / "pr"
        self.stage = self.root / f".stage-v{self.release}"
        if self.stage.exists():
            # An import was killed while it replaced the series.
            with self.lock():
                publish.mend(self.project.root / "patches" / f"v{self.release}", self.stage)
        self.folder = self.project.series_dir(self.release)
        self.base, self.patches = bases.load(self.folder), series.load(self.folder)
        self.contracts = self.project.root / "tests" / "contracts"
        self.shared = self.project.root / "patches" / "pr"
        self.store = Store(self.root)
        self.bench = Bench(self.contracts, self.options.python, self.root / "outcomes")
        self.progress = Progress(self.seconds)
        self._sources: dict[str, Commit] | None = None
        self._upstream: Upstream | None = None
        # The versions of Python and torch that tests and contracts run with.
        self.ran_on: dict[str, str] = {}

    @property
    def upstream(self) -> Upstream:
        """What branches are to stand on."""
        if not self._upstream:
            with self.progress.step(f"source of vLLM {self.release}"):
                if self.options.onto:
                    self._upstream = upstreams.onto(self.base, self.store, *self.options.onto)
                else:
                    self._upstream = upstreams.release(self.base, self.store, self.options.cache)
        return self._upstream

    @property
    def gitdir(self) -> Path | None:
        """The repository that gets the branches; without one, each has a tree of its own in build/pr."""
        return None if self.trial else self.upstream.gitdir

    @cached_property
    def without(self) -> str:
        """Why neither tests nor contracts can be run, if they cannot."""
        if not self.options.run:
            return "they were left out (--no-runs)"
        try:
            self.ran_on = interpreter(self.options.python)
        except UserError as e:
            return e.message
        return ""

    @cached_property
    def release_commit(self) -> str:
        """The base's own release."""
        return upstreams.release(self.base, self.store, self.options.cache).commit

    @property
    def sources(self) -> dict[str, Commit]:
        """The commits of the series, by the patches' names."""
        if self._sources is None:
            commits = self.store.series(self.release_commit, self.patches)
            found = {p.name: gitwork.commit_of(self.store.path, c) for p, c in zip(self.patches, commits, strict=True)}
            self._sources = found
        return self._sources

    def recorded(self, upstream: str) -> list[Path]:
        """Folders with what people once made of merges: for the upstream of this name alone, and the committed ones."""
        return [self.root / "resolutions" / upstream, self.shared / f"v{self.release}"]

    def result(self, patch: Patch, upstream: Upstream) -> Path:
        return self.root / ("check" if self.trial else "") / upstream.name / patch.name.removesuffix(".patch")

    def work(self, patch: Patch, upstream: Upstream) -> Path:
        return self.root / "work" / upstream.name / patch.name.removesuffix(".patch")

    def shown(self, path: Path) -> Path:
        return path.relative_to(self.project.root)

    def carrier(self, tree: Path, upstream: str, sources: dict[str, Commit] | None = None) -> Carrier:
        """What carries the series, or its commits in ``sources``, onto the upstream of this name."""
        return Carrier(tree, upstreams.LABEL, self.release, sources or self.sources, self.recorded(upstream))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this base's exports and imports."""
        busy = f"another export or import of vLLM {self.release} is running: wait for it"
        with locks.held(self.root / f".v{self.release}.lock", busy):
            yield

    def command(self, script: str, patch: Patch) -> str:
        """The command line that a message names."""
        onto = f" --onto {' '.join(map(str, self.options.onto))}" if self.options.onto else ""
        return f"ci/{script} {patch.number} --base {self.release}{onto}"
