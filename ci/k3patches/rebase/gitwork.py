"""What the rebase asks of git beyond single commands.  Nothing here knows of contracts."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from k3patches.git import GitError, git
from k3patches.tree import PRISTINE_TAG


@dataclass(frozen=True)
class Commit:
    """A commit and what the rebase looks at of it; ``author`` is name, address and date."""

    id: str
    tree: str
    message: str
    author: tuple[str, str, str]


def work_tree(folder: Path, pristine: str, objects: list[Path], shallow: Path | None = None) -> None:
    """Make ``folder`` a git work tree at the commit ``pristine``; what lies in ``objects`` is not copied.

    ``shallow`` is the file that says where the history in ``objects`` ends, if it is not whole.
    """
    folder.mkdir(parents=True)
    git("init", "-q", ".", cwd=folder)
    alternates = folder / ".git" / "objects" / "info" / "alternates"
    alternates.write_text("".join(f"{path.resolve()}\n" for path in objects))
    if shallow:
        shutil.copy2(shallow, folder / ".git" / "shallow")
    # gc would copy the borrowed objects, and what a person does not see yet must not be pruned.
    for key, value in (("gc.auto", "0"), ("merge.conflictStyle", "diff3"), ("core.autocrlf", "false")):
        git("config", key, value, cwd=folder)
    git("tag", PRISTINE_TAG, pristine, cwd=folder)
    git("reset", "-q", "--hard", pristine, cwd=folder)


def pristine(tree: Path) -> str:
    """The commit that everything in ``tree`` stands on."""
    return git("rev-parse", f"{PRISTINE_TAG}^{{commit}}", cwd=tree).strip()


def head(tree: Path) -> str:
    return git("rev-parse", "HEAD", cwd=tree).strip()


def tree_of(tree: Path, commit: str = "HEAD") -> str:
    return git("rev-parse", f"{commit}^{{tree}}", cwd=tree).strip()


def parent(tree: Path, commit: str) -> str:
    return git("rev-parse", f"{commit}^", cwd=tree).strip()


def has(tree: Path, what: str) -> bool:
    """Whether there is such an object: ``COMMIT``, or ``COMMIT:PATH``."""
    try:
        git("cat-file", "-e", what, cwd=tree)
    except GitError:
        return False
    return True


def commit_of(tree: Path, commit: str = "HEAD") -> Commit:
    return _commits(tree, "-1", commit)[0]


def above(tree: Path, base: str) -> list[Commit]:
    """The commits from ``base``, left out, to HEAD, oldest first."""
    return _commits(tree, "--reverse", f"{base}..HEAD")


def _commits(tree: Path, *which: str) -> list[Commit]:
    shown = git("log", "-z", "--format=%H%n%T%n%an%n%ae%n%ad%n%B", "--date=raw", *which, "--", cwd=tree)
    found = []
    for entry in filter(None, shown.split("\0")):
        id_, content, name, address, date, message = entry.split("\n", 5)
        found.append(Commit(id_, content, message.rstrip("\n") + "\n", (name, address, date)))
    return found


def write_commit(tree: Path, content: str, parent: str, message: str, author: tuple[str, str, str]) -> str:
    """Store a commit of the tree object ``content``, without touching work tree or HEAD."""
    name, address, date = author
    date = f"@{date.removeprefix('@')}"
    env = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": address, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    return git("commit-tree", content, "-p", parent, "-m", message.rstrip("\n"), cwd=tree, env=env).strip()


def content_of_worktree(tree: Path) -> str:
    """Store the work tree as it is, conflict markers included, and return the tree object; the index stays."""
    with tempfile.TemporaryDirectory(dir=tree / ".git") as folder:
        index = Path(folder) / "index"
        shutil.copy2(tree / ".git" / "index", index)
        env = {"GIT_INDEX_FILE": str(index)}
        git("add", "-A", cwd=tree, env=env)
        return git("write-tree", cwd=tree, env=env).strip()


def unmerged(tree: Path) -> dict[str, str]:
    """Paths in conflict, with git's two letters for how (``UU``, ``DU`` ..)."""
    found = {}
    for entry in git("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", cwd=tree).split("\0"):
        if entry[:2] in ("DD", "AU", "UD", "UA", "DU", "AA", "UU"):
            found[entry[3:]] = entry[:2]
    return found


def picking(tree: Path) -> bool:
    """Whether a cherry-pick waits for its conflicts to be resolved."""
    return (tree / ".git" / "CHERRY_PICK_HEAD").exists()
