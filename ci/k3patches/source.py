"""Unpack a release's source into a folder, from an sdist, a checkout or a git remote."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from filelock import FileLock

from k3patches.errors import UserError
from k3patches.git import GitError, git, git_as_user

COMMIT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# What git says where the repository is well, and has no such ref.
UNKNOWN_REF = re.compile(r"couldn't find remote ref|not our ref|invalid refspec")


class Source(Protocol):
    """Where a tree comes from.

    ``identity`` names it in words; where ``pinned``, the same identity is the same content.
    ``unpack`` fills an empty folder.
    """

    @property
    def identity(self) -> str: ...

    @property
    def pinned(self) -> bool: ...

    def unpack(self, into: Path) -> None: ...


@dataclass(frozen=True)
class Sdist:
    """A checked sdist."""

    path: Path
    sha256: str
    pinned = True

    @property
    def identity(self) -> str:
        return f"sdist sha256 {self.sha256}"

    def unpack(self, into: Path) -> None:
        """Unpack below ``into``, without the archive's one top folder.

        A member that would land outside, a device, or a ``.git`` of the archive's own is an error.
        """
        if not hasattr(tarfile, "data_filter"):
            raise UserError("this Python unpacks archives without guarding their paths: use 3.10.12, 3.11.4 or newer")
        try:
            with gzip.open(self.path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    parts = PurePosixPath(member.name).parts
                    if ".git" in parts or ".." in parts or member.name.startswith("/"):
                        raise UserError(f"{self.path} holds {member.name!r}, which a source archive must not: not used")
                    if len(parts) < 2:
                        continue
                    member.name = str(PurePosixPath(*parts[1:]))
                    if member.islnk():
                        # A hard link names its target from the archive's top, a symbolic one from its own place.
                        member.linkname = str(PurePosixPath(*PurePosixPath(member.linkname).parts[1:]))
                    archive.extract(member, into, filter="data")
                # tarfile takes a broken header for the archive's end; only gzip's checksum, at its end, tells.
                while stream.read(1 << 20):
                    pass
        except tarfile.FilterError as e:
            raise UserError(f"{self.path} is not safe to unpack: {e}") from None
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise UserError(f"{self.path} is damaged ({e}): delete it and fetch it again") from None


@dataclass(frozen=True)
class Folder:
    """A source folder of the user's own, which may change at any time."""

    path: Path
    pinned = False

    @property
    def identity(self) -> str:
        return f"folder {self.path.resolve()}"

    def unpack(self, into: Path) -> None:
        if not (self.path / "vllm" / "__init__.py").is_file():
            raise UserError(f"{self.path} holds no vLLM source: name the folder that has vllm/__init__.py below it")
        ignore = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(self.path, into, symlinks=True, ignore=ignore, dirs_exist_ok=True)


@dataclass(frozen=True)
class GitCommit:
    """A commit of a git repository, already resolved and fetched into ``store``."""

    url: str
    commit: str
    store: Path
    pinned = True

    @classmethod
    def resolve(cls, url: str, ref: str, store: Path) -> GitCommit:
        """Fetch ``ref`` of ``url`` into the bare repository ``store``, and wait while another process does.

        A repository of this machine knows every name that git does, ``main~9`` and short ids too; another one its
        branches, tags and whole commit ids.
        """
        store.mkdir(parents=True, exist_ok=True)
        commit = ref
        if (folder := Path(url.removeprefix("file://"))).exists():
            # A path is meant from where the user stands, not from the store.
            url = str(folder.resolve())
            with contextlib.suppress(GitError):
                commit = git_as_user("rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}", cwd=folder)
        with _alone(store):
            try:
                git("init", "-q", "--bare", ".", cwd=store)
                return cls(url, _fetch(url, commit.strip(), store), store)
            except GitError as e:
                advice = ": give a branch, a tag or a whole commit id" if UNKNOWN_REF.search(str(e)) else ""
                raise UserError(f"cannot fetch {ref} of {url} ({e.brief}){advice}") from None

    @property
    def identity(self) -> str:
        return f"git {self.url} {self.commit}"

    def unpack(self, into: Path) -> None:
        # The store has one index.
        with _alone(self.store):
            git("--work-tree", into.resolve(), "checkout", "-q", "-f", self.commit, "--", ".", cwd=self.store)


def _alone(store: Path) -> FileLock:
    return FileLock(store.with_suffix(".lock"))


def _fetch(url: str, ref: str, store: Path) -> str:
    """The id of the commit that ``ref`` is, which is then in ``store``.  Nobody else may be at work there."""
    if COMMIT_ID.fullmatch(ref):
        with contextlib.suppress(GitError):
            return git("rev-parse", "--verify", f"{ref}^{{commit}}", cwd=store).strip()
    for lock in store.rglob("*.lock"):
        # Of a git that was killed.
        lock.unlink()
    git_as_user("fetch", "-q", "--depth", "1", "--no-tags", "--", url, ref, cwd=store)
    commit = git("rev-parse", "FETCH_HEAD^{commit}", cwd=store).strip()
    # What a ref names need not be sent again, but for what changed.
    git("update-ref", "refs/fetched/last", commit, cwd=store)
    return commit
