"""Write a series from the commits of a git tree."""

from __future__ import annotations

import shutil
from pathlib import Path

from k3patches import series
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.messages import CONTRACT
from k3patches.tree import PRISTINE_TAG, replacing

# Two exports of one commit are the same bytes on any day and machine; whole blob ids let git merge three ways,
# and a rename written out is understood by patch and quilt as well.
EXPORT = (
    "format-patch",
    "-1",
    "--stdout",
    "--no-signature",
    "--zero-commit",
    "--no-numbered",
    "--full-index",
    "--no-renames",
)


def export(tree: Path, commit: str) -> bytes:
    """A commit as the project's canonical patch file."""
    return git(*EXPORT, commit, cwd=tree).rstrip("\n").encode() + b"\n"


def refresh(tree: Path, folder: Path) -> list[str]:
    """Make ``folder`` the series of ``tree``'s commits above its pristine one, and return the patches' names.

    A patch is named after the first fix in its Contract trailer.  The folder changes as a whole,
    or not at all; comments that open the series file stay.
    """
    try:
        commits = git("rev-list", "--reverse", "--no-merges", f"{PRISTINE_TAG}..HEAD", cwd=tree).split()
        merges = git("rev-list", "--merges", f"{PRISTINE_TAG}..HEAD", cwd=tree).split()
        dirty = git("status", "--porcelain", cwd=tree)
    except GitError as e:
        raise UserError(
            f"{tree} is no git tree with a tag '{PRISTINE_TAG}' on the release's source ({e.brief}): "
            f"name one such as apply makes"
        ) from None
    if dirty or merges:
        what = f"a merge, {merges[0]}" if merges else "uncommitted changes"
        raise UserError(f"{tree} has {what}: a series is a line of commits, so commit or rebase first")
    names = []
    with replacing(folder) as new:
        for other in folder.iterdir():
            if other.suffix != ".patch" and other.name != series.SERIES_FILE:
                (shutil.copytree if other.is_dir() else shutil.copy2)(other, new / other.name)
        for number, commit in enumerate(commits, 1):
            draft = new / "draft"
            draft.write_bytes(export(tree, commit))
            patch = series.read(draft)
            if not patch.contracts:
                raise UserError(f"commit {commit[:12]} ({patch.subject}) has no {CONTRACT} trailer: add one")
            names.append(f"{number:04d}-{patch.contracts[0]}.patch")
            draft.rename(new / names[-1])
        (new / series.SERIES_FILE).write_text("".join(f"{line}\n" for line in [*_opening(folder), *names]))
    return names


def _opening(folder: Path) -> list[str]:
    path = folder / series.SERIES_FILE
    lines = path.read_text().splitlines() if path.is_file() else []
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:end]
