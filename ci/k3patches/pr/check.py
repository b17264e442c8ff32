"""Try the way back: an import of an untouched branch changes nothing, that of an edited one only the edit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from k3patches.errors import UserError
from k3patches.git import git
from k3patches.pr import place
from k3patches.pr.desk import Desk
from k3patches.pr.imports import Branch, Import, Imported, locate
from k3patches.rebase import gitwork
from k3patches.rebase.errors import NeedsPerson
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG

PLACES = ("first", "last", "top")
LINE = "# A maintainer asked for this line.\n"


def there_and_back(desk: Desk, patch: Patch) -> str:
    """Import the branch that was exported, without an edit and with a line more in each of its files; write nothing."""
    folder = desk.result(patch, desk.upstream)
    try:
        branch = locate(desk, patch, None, None, None)
        untouched, _ = _import(desk, patch, branch, lambda importing: [])
        if untouched.changed:
            raise UserError(
                f"{patch.name}: an import without an edit changes {', '.join(untouched.changed)}: report it"
            )
        tree = folder / place.TREE
        for where in PLACES:
            edited = _edit(tree, patch, desk.sources[patch.name].author, where)
            try:
                found, wrong = _import(desk, patch, branch, partial(_beside, desk, patch, edited))
                break
            except NeedsPerson:
                # Right beside what a later patch changes; only a person can say what is meant there.
                if where == PLACES[-1]:
                    raise
                git("reset", "-q", "--hard", "HEAD^", cwd=tree)
        if list(found.changed)[:1] != [patch.name] or found.changed[patch.name] != "the edit":
            wrong.append(f"it changes {', '.join(found.changed) or 'nothing'}")
        if wrong:
            raise UserError(f"{patch.name}: the import of a line more is wrong, {'; '.join(wrong)}: report it")
        return "only the edit" + "".join(_others(patch, found.changed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _others(patch: Patch, changed: Mapping[str, str]) -> Iterator[str]:
    """The later patches that an edit moved, by what it changed of them."""
    for how in dict.fromkeys(how for name, how in changed.items() if name != patch.name):
        numbers = ", ".join(name[:4] for name, other in changed.items() if other == how)
        yield f"; {how} of {numbers}"


def _edit(tree: Path, patch: Patch, author: tuple[str, str, str], where: str) -> dict[str, int]:
    """Commit a line more in each file of the branch's patch, and give the lines' numbers.

    ``where``: at the beginning of the first or the last addition, or at the top of the file, behind its header.
    """
    places = {}
    for name in patch.files:
        hunks = git("diff", "-U0", "--no-renames", "HEAD^", "HEAD", "--", name, cwd=tree).splitlines()
        starts = [line.split()[2][1:] for line in hunks if line.startswith("@@ ")]
        added = [start for start in starts if not start.endswith(",0")]
        if added and name.endswith(".py") and (tree / name).is_file():
            chosen = {"first": added[0], "last": added[-1], "top": "3"}[where]
            places[name] = int(chosen.partition(",")[0])
    for name, number in places.items():
        lines = (tree / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tree / name).write_text("".join([*lines[: number - 1], LINE, *lines[number - 1 :]]), encoding="utf-8")
    # Another author would become a co-author, which is a change of the message.
    who = {"GIT_AUTHOR_NAME": author[0], "GIT_AUTHOR_EMAIL": author[1]}
    git("commit", "-q", "--no-verify", "-a", "-m", "Apply suggestions from code review", cwd=tree, env=who)
    return places


def _beside(desk: Desk, patch: Patch, edited: Mapping[str, int], importing: Import) -> list[str]:
    """What separates the imported series from the old one, beside the edit."""
    wrong = []
    edit = False
    for old, new in zip(desk.patches, gitwork.above(importing.tree, PRISTINE_TAG), strict=True):
        edit = edit or old.name == patch.name
        source = desk.sources[old.name]
        if (new.message, new.author) != (source.message, source.author):
            wrong.append(f"{old.name} has another message")
        told = git("diff", "-U0", "--no-renames", source.id, new.id, cwd=importing.tree).splitlines()
        lines = [line for line in told if line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))]
        files = [line.removeprefix("+++ b/") for line in told if line.startswith("+++ ")]
        # A later patch may take a file away again.
        wanted = sorted(f for f in edited if gitwork.has(importing.tree, f"{source.id}:{f}")) if edit else []
        if files != wanted or lines != [f"+{LINE.rstrip()}"] * len(wanted):
            wrong.append(f"the tree at {old.name} differs by more than the edit")
    return wrong


def _import(
    desk: Desk, patch: Patch, branch: Branch, judge: Callable[[Import], list[str]]
) -> tuple[Imported, list[str]]:
    importing = Import(desk, patch)
    try:
        imported = importing.start(branch)
        return imported, judge(importing)
    finally:
        shutil.rmtree(importing.folder, ignore_errors=True)
