"""Take out of commits what only this project reads: its trailers, and files of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from k3patches.errors import UserError
from k3patches.git import git, plain_environment

# A patch may bring files for this project's own use along; they have their place here, and upstream never sees them.
FILES = ("k3-patches",)
# Holds the commit that was exported, whatever becomes of the branch.
REF = "refs/k3/exported"
# The body of a function of ``message``, as git-filter-repo takes it; it runs in a process of its own.
CALLBACK = f"""
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from k3patches import messages
return messages.without_own(message.decode(errors="surrogateescape")).encode(errors="surrogateescape")
"""


def strip(tree: Path, base: str, commits: Sequence[str]) -> list[str]:
    """The counterparts of ``commits``, a line on ``base``, as upstream is to see them; they are in ``tree`` then."""
    with tempfile.TemporaryDirectory(prefix=".strip-", dir=tree.parent) as scratch:
        folder = Path(scratch)
        git("init", "-q", "--bare", ".", cwd=folder)
        # The tree's own alternates count as well.
        (folder / "objects" / "info" / "alternates").write_text(f"{(tree / '.git' / 'objects').resolve()}\n")
        if (tree / ".git" / "shallow").is_file():
            shutil.copy2(tree / ".git" / "shallow", folder)
        git("update-ref", "refs/heads/branch", commits[-1], cwd=folder)
        what = ["--refs", f"{base}..refs/heads/branch", "--message-callback", CALLBACK]
        what += ["--invert-paths", *(f"--path={name}" for name in FILES)]
        # Nothing but these commits is here, so --force endangers nothing.
        command = [
            sys.executable,
            "-m",
            "git_filter_repo",
            "--quiet",
            "--force",
            "--partial",
            "--preserve-commit-hashes",
        ]
        done = subprocess.run(
            [*command, *what], cwd=folder, env=plain_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"git-filter-repo failed ({last}): install it with pip install -r ci/requirements.txt")
        found = git("rev-list", "--reverse", f"{base}..refs/heads/branch", cwd=folder).split()
        if len(found) != len(commits):
            raise UserError(
                f"a patch changes only files below {FILES[0]}/, which are not for upstream: export no such one"
            )
        git("fetch", "-q", "--no-tags", "--no-auto-gc", folder, f"+refs/heads/branch:{REF}", cwd=tree)
        return found


def with_own_files(tree: Path, content: str, source: str) -> str:
    """The tree object ``content`` with this project's own files as the commit ``source`` has them."""
    entries = []
    for commit, wanted in ((content, False), (source, True)):
        for entry in filter(None, git("ls-tree", "-z", commit, cwd=tree).split("\0")):
            if (entry.partition("\t")[2] in FILES) == wanted:
                entries.append(entry)
    listed = "".join(f"{entry}\0" for entry in entries)
    return git("mktree", "-z", cwd=tree, given=listed).strip()
