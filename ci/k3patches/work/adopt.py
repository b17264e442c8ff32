"""Take a tree whose commits are the series, as written from it, for one that apply made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from k3patches import files, refresh
from k3patches import tree as trees
from k3patches.git import GitError, git
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG


def adopt(tree: Path, patches: Sequence[Patch]) -> None:
    """Note that ``tree`` is what it would be if ``patches`` were applied anew; any other is left as it is."""
    try:
        state = trees.State(**json.loads((tree / trees.STATE).read_text()))
        head = git("rev-parse", "HEAD", cwd=tree).strip()
        if head == state.head:
            return
        # The source is the one that was unpacked: nobody moved the tag, and it has no history of its own.
        git("merge-base", "--is-ancestor", PRISTINE_TAG, state.head, cwd=tree)
        git("merge-base", "--is-ancestor", PRISTINE_TAG, head, cwd=tree)
        roots = git("rev-list", "--max-parents=0", head, state.head, cwd=tree).split()
        commits = git("rev-list", "--reverse", f"{PRISTINE_TAG}..HEAD", cwd=tree).split()
        ours = (
            roots == [git("rev-parse", f"{PRISTINE_TAG}^{{commit}}", cwd=tree).strip()]
            and not git("rev-list", "--merges", f"{PRISTINE_TAG}..HEAD", cwd=tree)
            and [refresh.export(tree, commit) for commit in commits] == [patch.data for patch in patches]
        )
    except (OSError, ValueError, TypeError, GitError):
        return
    if ours:
        made = replace(state, patches=[(p.name, p.sha256) for p in patches], head=head)
        files.write_record(tree / trees.STATE, made)
