"""Where a branch goes, whole or not at all, and what may be overwritten there."""

from __future__ import annotations

from pathlib import Path

from k3patches import tree as trees
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.pr import strip
from k3patches.pr.record import EXPORTED, Exported, exported
from k3patches.rebase import gitwork

DESCRIPTION, TREE = "description.md", "tree"


def branch_of(fix: str) -> str:
    return f"k3/{fix}"


def require_free(folder: Path, shown: Path, gitdir: Path | None, branch: str, commit: str) -> None:
    """Make sure that nobody's work is where ``commit`` goes; what an earlier export made and nobody touched is none."""
    known = exported(folder)
    ours: set[str | None] = {commit, known.commit, known.imported} if known else {commit}
    if gitdir is None:
        if folder.exists() and not _untouched(folder / TREE, ours):
            raise UserError(
                f"{shown} holds work that is in no patch yet: take it in with ci/import-pr.sh, or delete the folder"
            )
        return
    tip = branch_tip(gitdir, branch)
    if tip in (None, commit):
        return
    if at := checked_out(gitdir, branch):
        raise UserError(f"{branch} is checked out in {at}: switch to another branch there, or name one with --branch")
    if not (known and tip in ours and (known.branch, known.gitdir) == (branch, str(gitdir))):
        raise UserError(
            f"{gitdir} has a branch {branch} that was not exported from here, or changed since: take it in with "
            f"ci/import-pr.sh, delete it, or name another with --branch"
        )


def _untouched(tree: Path, ours: set[str | None]) -> bool:
    try:
        return gitwork.head(tree) in ours and not git("status", "--porcelain", cwd=tree)
    except GitError:
        return False


def branch_tip(gitdir: Path, branch: str) -> str | None:
    try:
        return git("rev-parse", "-q", "--verify", f"refs/heads/{branch}^{{commit}}", cwd=gitdir).strip()
    except GitError:
        return None


def checked_out(gitdir: Path, branch: str) -> str | None:
    """The work tree in which ``branch`` is checked out, if it is."""
    where = None
    for line in git("worktree", "list", "--porcelain", cwd=gitdir).splitlines():
        where = line.removeprefix("worktree ") if line.startswith("worktree ") else where
        if line == f"branch refs/heads/{branch}":
            return where
    return None


def put(folder: Path, tree: Path, record: Exported, description: str) -> None:
    """Put the branch, its description and its record in place; ``tree`` has the commit."""
    if record.gitdir is None:
        git("checkout", "-q", "-B", record.branch, record.commit, cwd=tree)
        # What the tests left behind that .gitignore hides.
        git("clean", "-q", "-f", "-d", "-x", cwd=tree)
    else:
        # git refuses to move a branch that is checked out somewhere, so that no work tree falls behind.
        if branch_tip(Path(record.gitdir), record.branch) != record.commit:
            _fetch(Path(record.gitdir), tree, f"+{strip.REF}:refs/heads/{record.branch}")
    with trees.replacing(folder) as new:
        if record.gitdir is None:
            tree.rename(new / TREE)
        (new / DESCRIPTION).write_text(description, encoding="utf-8")
        (new / EXPORTED).write_text(record.text())


def _fetch(gitdir: Path, tree: Path, refs: str) -> None:
    how = ("--no-tags", "--no-auto-gc", "--no-write-fetch-head")
    git("fetch", "-q", *how, tree.resolve(), refs, cwd=gitdir)
