"""The patched tree: a git work tree with one commit a patch on top of the pristine source."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from k3patches import series
from k3patches.base import Base
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.series import Patch
from k3patches.source import Source

PRISTINE_TAG = "pristine"
# Kept inside .git, where no patch can reach it and no diff shows it.
STATE = ".git/k3-state.json"
# Has git add write one pack, which takes half the CPU time of a file for each of thousands of blobs.
IN_ONE_PACK = ("-c", "core.bigFileThreshold=1", "-c", "core.compression=1")


@dataclass(frozen=True)
class State:
    """What a tree was made of: its source in words, (name, sha256) of each patch, the commit that resulted."""

    source: str
    patches: list[tuple[str, str]]
    head: str


@dataclass(frozen=True)
class Change:
    """A file that the series changes: its path in the tree and its new content (``None``: deleted)."""

    path: str
    content: bytes | None

    @property
    def sha256(self) -> str | None:
        return None if self.content is None else hashlib.sha256(self.content).hexdigest()


def apply(base: Base, source: Source, patches: Sequence[Patch], tree: Path) -> None:
    """Make ``tree`` the pristine source plus ``patches``, each applied exactly: no fuzz, no offset.

    A tree that is already that is left alone; the old one stays until the new one is complete,
    and one with work of a person's in it is an error.
    """
    wanted = State(source.identity, [(p.name, p.sha256) for p in patches], head="")
    _sweep(tree)
    if tree.exists():
        state = require_ours(tree)
        if source.pinned and (state.source, state.patches) == (wanted.source, wanted.patches):
            return
    with replacing(tree) as new:
        source.unpack(new)
        start(new, base)
        try:
            for patch in patches:
                apply_one(new, patch)
        except UserError as e:
            raise _unlike(new, base, patches, e) from None
        head = git("rev-parse", "HEAD", cwd=new).strip()
        (new / STATE).write_text(json.dumps(asdict(replace(wanted, head=head))))


def start(tree: Path, base: Base) -> None:
    """Turn an unpacked source into a git repository of one commit."""
    git("init", "-q", ".", cwd=tree)
    # What the release's own .gitignore hides (vllm/_version.py) is part of the source as well.
    git(*IN_ONE_PACK, "add", "-A", "-f", ".", cwd=tree)
    git("commit", "-q", "--no-verify", "-m", f"vLLM {base.release}, pristine", cwd=tree, date=base.released)
    git("tag", PRISTINE_TAG, cwd=tree)


def apply_one(tree: Path, patch: Patch) -> None:
    """Commit one patch onto ``tree``'s HEAD."""
    try:
        told = git(
            "apply", "--check", "--verbose", "--whitespace=nowarn", patch.path.resolve(), cwd=tree, messages=True
        )
        moved = re.search(r"^Hunk #\d+ succeeded at .*offset.*$", told, re.M)
    except GitError as e:
        reason = next((line for line in str(e).splitlines() if line.startswith("error: ")), str(e))
        raise UserError(f"{patch.name} does not apply: {reason.removeprefix('error: ')}") from None
    if moved:
        raise UserError(f"{patch.name} applies only with an offset ({moved[0]}): refresh it on this base")
    try:
        # am takes every bracket of the subject for its own, [Bugfix] included, unless told otherwise.
        how = ("--quiet", "--keep-non-patch", "--no-gpg-sign", "--committer-date-is-author-date")
        git("am", *how, patch.path.resolve(), cwd=tree)
    except GitError as e:
        raise UserError(f"git am does not take {patch.name} ({e.brief}): export its commit again") from None


def _unlike(tree: Path, base: Base, patches: Sequence[Patch], error: UserError) -> UserError:
    """``error``, and first that ``tree`` is not of the release that ``patches`` are for, where that is why."""
    blobs = pristine_blobs(tree, ".")
    preimages = series.preimages(patches)
    others = sorted(path for path, blob in preimages.items() if blobs.get(path) != blob)
    if not others:
        return error
    names = ", ".join(others[:3]) + (" and more" if others[3:] else "")
    return UserError(
        f"this source is not vLLM {base.release}: {len(others)} of the {len(preimages)} files that the series changes "
        f"are others ({names}); carry the series to it with ci/rebase.sh ({error})"
    )


def changes(tree: Path) -> list[Change]:
    """The files that differ between the pristine commit and HEAD, in path order."""
    listed = git("diff", "--name-only", "--no-renames", "-z", PRISTINE_TAG, "HEAD", cwd=tree).split("\0")
    return [Change(p, (tree / p).read_bytes() if (tree / p).is_file() else None) for p in sorted(listed) if p]


def pristine_blobs(tree: Path, folder: str) -> dict[str, str]:
    """git's blob id of each pristine file below ``folder``."""
    listed = git("ls-tree", "-r", "-z", PRISTINE_TAG, "--", folder, cwd=tree).split("\0")
    return {path: meta.split()[2] for meta, _, path in (entry.partition("\t") for entry in listed) if path}


def blob_id(content: bytes) -> str:
    """The id under which git stores ``content``."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a new empty folder that takes ``folder``'s place when the block ends well.

    What earlier, killed runs left beside it is removed.  Callers hold the project's lock.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        yield new
        if folder.exists():
            folder.rename(new.with_name(new.name.replace(".new-", ".old-")))
        new.chmod(0o755)
        new.rename(folder)
    finally:
        _sweep(folder)


def _sweep(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def require_ours(tree: Path) -> State:
    """What :func:`apply` made of ``tree``; anything done to it since is an error, so that nobody's work is lost."""
    try:
        state = State(**json.loads((tree / STATE).read_text()))
        state = replace(state, patches=[(name, sha) for name, sha in state.patches])
        clean = (
            not git("status", "--porcelain", cwd=tree)
            and state.head == git("rev-parse", "HEAD", cwd=tree).strip()
            # A branch or a stash holds work as well.
            and len(git("for-each-ref", cwd=tree).splitlines()) == 2
        )
    except FileNotFoundError:
        raise UserError(
            f"{tree} is no tree of this project: run apply (first move the folder away if it is yours)"
        ) from None
    except (GitError, TypeError, ValueError) as e:
        raise UserError(
            f"{tree} is damaged ({e.brief if isinstance(e, GitError) else e}): delete the folder and run apply"
        ) from None
    if not clean:
        raise UserError(f"{tree} has changes that no patch made: save them, delete the folder and run apply again")
    return state
