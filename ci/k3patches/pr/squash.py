"""Read a branch that people worked on: its commits as one change, with its message and everybody's credit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3patches import messages
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.messages import OWN, Message, Trailer
from k3patches.rebase import gitwork
from k3patches.rebase.gitwork import Commit

CREDIT = ("Signed-off-by", "Co-authored-by")
DRAFTS = ("fixup! ", "squash! ", "amend! ")


def commits(tree: Path, start: str, branch: str) -> list[Commit]:
    """The commits of ``branch`` above ``start``, oldest first; they must be a line."""
    try:
        git("merge-base", "--is-ancestor", start, branch, cwd=tree)
    except GitError:
        raise UserError(
            f"the branch no longer stands on {start[:12]}, which it was exported onto: name the commit below its first "
            f"one with --since"
        ) from None
    if merges := git("rev-list", "--merges", f"{start}..{branch}", cwd=tree).split():
        raise UserError(
            f"the branch has a merge, {merges[0][:12]}: rebase it into a line, and name what is below it with --since"
        )
    found = [gitwork.commit_of(tree, c) for c in git("rev-list", "--reverse", f"{start}..{branch}", cwd=tree).split()]
    if not found:
        raise UserError("the branch holds no commit of the patch: nothing is imported")
    return found


def require_own(gitdir: Path, branch: str, start: str, tip: str) -> None:
    """Make sure that the commits above ``start`` are this branch's alone; a rebase brings upstream's among them."""
    own = git("rev-list", f"{start}..{tip}", cwd=gitdir).split()
    others = ["--not", f"--exclude={branch}", "--branches", "--remotes", "--tags"]
    alone = set(git("rev-list", f"{start}..{tip}", *others, cwd=gitdir).split())
    if shared := [commit for commit in own if commit not in alone]:
        raise UserError(
            f"{branch} holds {shared[0][:12]}, which is on another branch as well, as after a rebase: name the commit "
            f"below the patch's first one with --since"
        )


def message(found: Sequence[Commit], patch: Commit, exported: Commit | None) -> str:
    """The patch's message after the branch ``found``: the first commit's, this project's trailers, and all credits."""
    first, *others = found
    old, new = messages.parse(patch.message), messages.parse(first.message)
    if exported and first.message == exported.message:
        body, trailers = old.body, list(old.trailers)
    else:
        body = new.body
        trailers = [t for t in old.trailers if t.key in OWN] + [t for t in new.trailers if t.key not in OWN]
    known = {address for _, address, _ in (patch.author, first.author)}
    for commit in others:
        name, address, _ = commit.author
        credits = [t for t in messages.parse(commit.message).trailers if t.key in CREDIT]
        # Whoever signs off is named by that; a review's author who does not is a co-author.
        if address not in known and not any(f"<{address}>" in t.value for t in [*credits, *trailers]):
            credits.insert(0, Trailer(f"Co-authored-by: {name} <{address}>"))
        trailers += [t for t in credits if t not in trailers]
    return str(Message(body, tuple(trailers)))
