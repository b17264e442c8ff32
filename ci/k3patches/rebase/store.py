"""The sources and the series as commits, kept between runs so that each is unpacked and applied once."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock

from k3patches import tree as trees
from k3patches.git import GitError, git
from k3patches.rebase import gitwork
from k3patches.series import Patch
from k3patches.source import Source

LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Store:
    """A bare repository in ``folder``; several rebases may use it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "store.git"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".store.lock")

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    def pristine(self, source: Source) -> str:
        """The commit of ``source``'s content."""
        ref = f"refs/sources/{_key(source.identity)}"
        # Refs are moved whole, so what is there can be read while another run holds the lock to unpack.
        if source.pinned and (known := self._known(ref)):
            return known
        with self._open():
            if source.pinned and (known := self._known(ref)):
                return known
            with self._scratch() as folder:
                source.unpack(folder)
                (self.path / "index").unlink(missing_ok=True)
                # What the release's own .gitignore hides (vllm/_version.py) is part of the source as well.
                git(*trees.IN_ONE_PACK, "--work-tree", folder, "add", "-A", "-f", ".", cwd=self.path)
                content = git("write-tree", cwd=self.path).strip()
                message = f"{source.identity}\n" if source.pinned else "vLLM, pristine"
                commit = git("commit-tree", content, "-m", message, cwd=self.path, date=LONG_AGO).strip()
            git("update-ref", ref, commit, cwd=self.path)
            return commit

    def series(self, pristine: str, patches: Sequence[Patch]) -> list[str]:
        """The commits of ``patches``, applied in order to the commit ``pristine``."""
        ref = f"refs/series/{series_key(self.content(pristine), [p.data for p in patches])}"
        if not self._known(ref):
            with self._open(), self._scratch() as folder:
                tree = folder / "tree"
                gitwork.work_tree(tree, pristine, [self.objects])
                for patch in patches:
                    trees.apply_one(tree, patch)
                self._take(tree, ref)
        return git("rev-list", "--reverse", f"{pristine}..{ref}", cwd=self.path).split()

    def remember(self, tree: Path, mails: Sequence[bytes]) -> None:
        """Keep ``tree``'s commits, whose patch files are ``mails``: the next rebase starts from them."""
        content = gitwork.tree_of(tree, trees.PRISTINE_TAG)
        with self._open():
            self._take(tree, f"refs/series/{series_key(content, mails)}")

    def content(self, commit: str) -> str:
        return git("rev-parse", f"{commit}^{{tree}}", cwd=self.path).strip()

    def _take(self, tree: Path, ref: str) -> None:
        git("fetch", "-q", "--no-tags", "--no-auto-gc", tree.resolve(), f"+HEAD:{ref}", cwd=self.path)

    def _known(self, ref: str) -> str | None:
        try:
            return git("rev-parse", "-q", "--verify", f"{ref}^{{commit}}", cwd=self.path).strip()
        except GitError:
            return None

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if not (self.path / "HEAD").is_file():
                shutil.rmtree(self.path, ignore_errors=True)
                with self._scratch() as new:
                    git("init", "-q", "--bare", ".", cwd=new)
                    for key, value in (("gc.auto", "0"), ("core.compression", "1")):
                        git("config", key, value, cwd=new)
                    new.rename(self.path)
            (self.path / "index.lock").unlink(missing_ok=True)
            yield

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        # Holding the lock, whatever a killed run left is garbage.
        for left in self.folder.glob(".scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".scratch-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def series_key(content: str, mails: Sequence[bytes]) -> str:
    digest = hashlib.sha256(content.encode())
    for mail in mails:
        digest.update(hashlib.sha256(mail).digest())
    return digest.hexdigest()[:40]


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
