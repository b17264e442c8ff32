"""Carry one patch over: git's three-way merge, and what a person once made of its result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from k3patches import messages
from k3patches.git import GitError, git
from k3patches.rebase import gitwork
from k3patches.rebase.gitwork import Commit
from k3patches.refresh import EXPORT

MARKERS = {"<": 0, "|": 1, ">": 2}
MARKER = re.compile(rb"^(<{7}|\|{7}|>{7}) (.*?)$", re.M)
# How many lines of a side a report shows.
LONGEST_SIDE = 40
NEWLINE = b"\n"
HOW = {
    "UU": "both changed it",
    "AA": "both added it",
    "DU": "{ours} has no such file, {theirs} changes it",
    "UD": "{ours} changed it, {theirs} deletes it",
    "AU": "{ours} has it under this name, {theirs} elsewhere",
    "UA": "{theirs} has it under this name, {ours} elsewhere",
    "DD": "both moved it elsewhere",
}


@dataclass(frozen=True)
class Labels:
    """What conflict markers call the sides; not git's words for them, which change with commits and versions."""

    ours: str
    base: str
    theirs: str

    @classmethod
    def of(cls, target: str, release: str, key: str) -> Labels:
        return cls(target, f"vLLM {release}", f"vLLM {release} with {key}")


@dataclass(frozen=True)
class Conflict:
    """A file that needs a person: ``how`` in words, and its hunks (line, text)."""

    path: str
    how: str
    hunks: list[tuple[int, str]]


@dataclass(frozen=True)
class Merge:
    """The automatic merge of a patch: a tree object, markers included, and the commit's message and author."""

    content: str
    message: str
    author: tuple[str, str, str]
    conflicts: list[Conflict]


def merge(tree: Path, commit: Commit, wanted: str, labels: Labels) -> Merge:
    """Carry ``commit`` onto ``tree``'s HEAD; ``wanted`` is its message there.

    Without conflict the result is committed, unless nothing is left of it; with one, git waits in the tree.
    """
    before = gitwork.commit_of(tree)
    how = ("--allow-empty", "--keep-redundant-commits", "--no-gpg-sign")
    try:
        git("-c", "merge.conflictStyle=diff3", "cherry-pick", *how, commit.id, cwd=tree)
    except GitError:
        paths = gitwork.unmerged(tree)
        if not paths:
            raise
        for path in paths:
            _name_sides(tree / path, labels)
        found = [_conflict(tree, path, letters, labels) for path, letters in sorted(paths.items())]
        (tree / ".git" / "MERGE_MSG").write_text(wanted)
        return Merge(gitwork.content_of_worktree(tree), wanted, commit.author, found)
    content = gitwork.tree_of(tree)
    for old, new in _renames(tree, commit, before).items():
        wanted = messages.renamed(wanted, old, new)
    if content == before.tree:
        git("reset", "-q", "--hard", before.id, cwd=tree)
    else:
        made = gitwork.write_commit(tree, content, before.id, wanted, commit.author)
        git("reset", "-q", "--soft", made, cwd=tree)
    return Merge(content, wanted, commit.author, [])


def resolve(tree: Path, before: str, merged: str, mail: Path) -> bool:
    """Put what ``mail`` records on top of the tree object ``merged``, as one commit on ``before``.

    False says that it does not fit; ``tree`` is at ``before`` then.
    """
    base = gitwork.write_commit(tree, merged, before, "merged", ("x", "x", "@0 +0000"))
    git("reset", "-q", "--hard", base, cwd=tree)
    try:
        how = ("--quiet", "--keep-non-patch", "--no-gpg-sign", "--whitespace=nowarn")
        # Only the message may have been changed.
        empty = () if b"\ndiff --git " in mail.read_bytes() else ("--empty=keep",)
        git("am", *how, *empty, mail.resolve(), cwd=tree)
    except GitError:
        if (tree / ".git" / "rebase-apply").exists():
            git("am", "--abort", cwd=tree)
        git("reset", "-q", "--hard", before, cwd=tree)
        return False
    made = gitwork.commit_of(tree)
    git("reset", "-q", "--soft", gitwork.write_commit(tree, made.tree, before, made.message, made.author), cwd=tree)
    return True


def record(tree: Path, before: str, merged: str, result: Commit) -> bytes:
    """The mail from the tree object ``merged`` to ``result``, in :func:`resolve`'s form."""
    base = gitwork.write_commit(tree, merged, before, "merged", ("x", "x", "@0 +0000"))
    made = gitwork.write_commit(tree, result.tree, base, result.message, result.author)
    return git(*EXPORT, "--always", made, cwd=tree).rstrip("\n").encode() + b"\n"


def markers(tree: Path, labels: Labels | None, paths: list[str]) -> list[str]:
    """``path:line`` of each conflict marker that is left in ``paths``."""
    left = []
    for path in paths:
        content = (tree / path).read_bytes() if (tree / path).is_file() else b""
        for match in MARKER.finditer(content):
            label = match[2].decode(errors="replace").partition(":")[0]
            if labels is None or label in (labels.ours, labels.base, labels.theirs):
                left.append(f"{path}:{content.count(NEWLINE, 0, match.start()) + 1}")
    return left


def _name_sides(path: Path, labels: Labels) -> None:
    names = (labels.ours, labels.base, labels.theirs)

    def name(match: re.Match[bytes]) -> bytes:
        told = match[2].decode(errors="replace")
        side = MARKERS[chr(match[1][0])]
        # git names a file beside its own label where the sides know it under different names.
        ours = side == 0 and told.partition(":")[0] == "HEAD"
        others = side > 0 and re.match(r"(parent of )?[0-9a-f]{7,40} \(", told)
        if not (ours or others):
            return match[0]
        file = re.search(r":([^:()]+)$", told)
        return match[1] + b" " + names[side].encode() + (f":{file[1]}".encode() if file else b"")

    if path.is_file() and not path.is_symlink():
        path.write_bytes(MARKER.sub(name, path.read_bytes()))


def _conflict(tree: Path, path: str, letters: str, labels: Labels) -> Conflict:
    hunks: list[tuple[int, str]] = []
    text = (tree / path).read_text(encoding="utf-8", errors="replace") if (tree / path).is_file() else ""
    start, lines = 0, text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith(f"<<<<<<< {labels.ours}"):
            start = number
        elif start and line.startswith(f">>>>>>> {labels.theirs}"):
            hunks.append((start, "\n".join(_shortened(lines[start - 1 : number]))))
            start = 0
    return Conflict(path, HOW[letters].format(ours=labels.ours, theirs=labels.theirs), hunks)


def _shortened(hunk: list[str]) -> list[str]:
    """The hunk with the middle of each long side left out."""
    marks = [i for i, line in enumerate(hunk) if line.startswith(("<<<<<<<", "|||||||", "=======", ">>>>>>>"))]
    short = []
    for start, end in zip(marks, [*marks[1:], len(hunk)], strict=True):
        side, half = hunk[start + 1 : end], LONGEST_SIDE // 2
        if len(side) > LONGEST_SIDE:
            side = [*side[:half], f"... {len(side) - LONGEST_SIDE} more lines ...", *side[-half:]]
        short += [hunk[start], *side]
    return short


def _renames(tree: Path, commit: Commit, before: Commit) -> dict[str, str]:
    """Names of the files that ``commit`` changes and that have another name in the target."""
    old = set(_paths(tree, f"{commit.id}^", commit.id))
    new = set(_paths(tree, before.id, "HEAD"))
    gone = sorted(old - new)
    if not gone or not new - old:
        return {}
    found = {}
    moved = git("diff", "-M", "--diff-filter=R", "--name-status", "-z", f"{commit.id}^", before.id, cwd=tree)
    fields = moved.split("\0")[:-1]
    for _, source, target in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        names = Path(source).name, Path(target).name
        if source in gone and names[0] != names[1] and names[0] not in {Path(p).name for p in new}:
            found[names[0]] = names[1]
    return found


def _paths(tree: Path, old: str, new: str) -> list[str]:
    return [p for p in git("diff", "--no-renames", "--name-only", "-z", old, new, cwd=tree).split("\0") if p]
