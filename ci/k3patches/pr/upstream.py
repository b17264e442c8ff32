"""What a branch stands on: the base's own release, or a commit of a git repository of the user's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from k3patches import fetch
from k3patches.base import Base
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.rebase import gitwork
from k3patches.rebase.store import Store
from k3patches.source import Sdist

# What conflict markers call upstream's side, whatever it is, so that a resolution fits wherever the text does.
LABEL = "upstream"


@dataclass(frozen=True)
class Upstream:
    """``name`` is the folder's name in build/pr, ``label`` what people call it.

    ``objects`` are the folders that hold the objects of ``commit``; ``gitdir`` is the user's repository, if it is one.
    """

    name: str
    label: str
    commit: str
    objects: tuple[Path, ...]
    gitdir: Path | None = None

    def tree(self, folder: Path) -> Path:
        """Make ``folder`` a git work tree at the commit."""
        gitwork.work_tree(folder, self.commit, list(self.objects), shallow(self.gitdir) if self.gitdir else None)
        return folder


def release(base: Base, store: Store, cache: Path) -> Upstream:
    """The release that the base is, from its pinned sdist."""
    source = Sdist(fetch.fetch(base.sdist, cache), base.sdist.sha256)
    return Upstream(f"v{base.release}", f"vLLM {base.release}", store.pristine(source), (store.objects,))


def onto(base: Base, store: Store, gitdir: Path, ref: str) -> Upstream:
    """A commit of the repository ``gitdir``."""
    if not (gitdir.is_dir() and is_repository(gitdir)):
        raise UserError(f"{gitdir} is no git repository: name a clone of vLLM, and a branch, tag or commit in it")
    try:
        commit = git("rev-parse", "--verify", "-q", f"{ref}^{{commit}}", cwd=gitdir).strip()
    except GitError:
        raise UserError(
            f"{gitdir} has no commit {ref}: fetch it first, or name another branch, tag or commit"
        ) from None
    if not git("ls-tree", commit, "--", "vllm/__init__.py", cwd=gitdir).strip():
        raise UserError(f"{ref} of {gitdir} holds no vLLM source: name a branch, tag or commit of a clone of vLLM")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", ref).strip(".-") or "ref"
    short = ref if commit.startswith(ref) else f"{ref} ({commit[:12]})"
    return Upstream(
        f"v{base.release}-onto-{name}",
        f"vLLM {short}",
        commit,
        (common(gitdir) / "objects", store.objects),
        gitdir.resolve(),
    )


def is_repository(folder: Path) -> bool:
    try:
        return common(folder).is_dir()
    except GitError:
        return False


def common(gitdir: Path) -> Path:
    """The folder that the repository's work trees share."""
    told = git("rev-parse", "--git-common-dir", cwd=gitdir).strip()
    return (gitdir / told).resolve()


def shallow(gitdir: Path) -> Path | None:
    """The file that says where the repository ends, if it does not hold all of the history."""
    path = common(gitdir) / "shallow"
    return path if path.is_file() else None
