"""Take a tree back from the person who was asked to edit it, or the commits of another tree of theirs."""

from __future__ import annotations

from pathlib import Path

from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.rebase import carry, gitwork
from k3patches.rebase.errors import NeedsPerson
from k3patches.rebase.target import Target
from k3patches.tree import PRISTINE_TAG


def take_back(tree: Path, shown: Path) -> None:
    """Make the resolved conflict in ``tree`` the commit that it waited for; ``shown`` is what messages call it.

    Whatever is undecided, or in no commit, is an error.
    """
    if untracked := git("ls-files", "--others", "--exclude-standard", "-z", cwd=tree).split("\0")[0]:
        raise NeedsPerson(f"{shown / untracked} belongs to no commit: git add it, or remove it")
    if under_way(tree):
        raise NeedsPerson(f"a git rebase or am of your own is under way in {shown}: finish it first")
    changed = [p for p in git("diff", "HEAD", "--name-only", "-z", cwd=tree).split("\0") if p]
    if left := carry.markers(tree, None, changed):
        raise NeedsPerson(f"{left[0]} in {shown} still is a conflict marker ({len(left)} in all): edit them out")
    if gitwork.picking(tree):
        # A file that only one side has shows no markers: what becomes of it must be said.
        for path, letters in gitwork.unmerged(tree).items():
            if letters not in ("UU", "AA"):
                raise NeedsPerson(f"{shown / path} is still undecided: git add it to keep it, or git rm it")
        _commit_pick(tree)
    elif changed:
        raise NeedsPerson(
            f"{shown / changed[0]} is changed and not committed: commit it into the patch that it belongs to "
            f"(git commit --fixup COMMIT, then git rebase -i --autosquash {PRISTINE_TAG})"
        )


def under_way(tree: Path) -> bool:
    """Whether a rebase or am of the person's own is not finished."""
    return any((tree / ".git" / name).exists() for name in ("rebase-merge", "rebase-apply"))


def _commit_pick(tree: Path) -> None:
    """Conclude the cherry-pick; one of which nothing is left makes no commit."""
    git("add", "-u", cwd=tree)
    result, content = gitwork.head(tree), git("write-tree", cwd=tree).strip()
    if content != gitwork.tree_of(tree):
        message = (tree / ".git" / "MERGE_MSG").read_text()
        picked = gitwork.commit_of(tree, "CHERRY_PICK_HEAD")
        result = gitwork.write_commit(tree, content, result, message, picked.author)
    git("reset", "-q", "--hard", result, cwd=tree)


def check_takeable(other: Path, tree: Path, target: Target) -> str:
    """The tag in ``other`` that is the pristine source of ``tree``; on it must be a line of commits."""
    source = gitwork.tree_of(tree, PRISTINE_TAG)
    try:
        known = set(git("tag", cwd=other).split())
        tags = [t for t in (PRISTINE_TAG, target.name) if t in known and gitwork.tree_of(other, t) == source]
    except GitError:
        tags = []
    if not tags:
        raise UserError(
            f"{other} has no tag '{PRISTINE_TAG}' or '{target.name}' on the source of {target.label}: "
            f"start from build/{target.name}/pristine, or another tree of exactly its files"
        )
    if git("rev-list", "--merges", f"{tags[0]}..HEAD", cwd=other) or git("status", "--porcelain", cwd=other):
        raise UserError(f"{other} has a merge or uncommitted changes: make it a line of commits")
    return tags[0]


def take_commits(other: Path, tree: Path, target: Target) -> str:
    """Put the commits of ``other`` on the pristine source of ``tree``, and return the last one."""
    tag = check_takeable(other, tree, target)
    git("fetch", "-q", "--no-tags", other.resolve(), "HEAD", cwd=tree)
    result = gitwork.pristine(tree)
    for commit in git("rev-list", "--reverse", f"{tag}..HEAD", cwd=other).split():
        taken = gitwork.commit_of(tree, commit)
        result = gitwork.write_commit(tree, taken.tree, result, taken.message, taken.author)
    return result
