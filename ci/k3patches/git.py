"""Run git the same way on every machine.  Nothing here knows of vLLM or of patches."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from k3patches.errors import UserError

IDENTITY = "k3-patches", "maintainers@users.noreply.k3-patches.example"


class GitError(Exception):
    """git said no; ``str()`` is what it printed, :attr:`brief` the line that says why."""

    @property
    def brief(self) -> str:
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        return next(
            (line for line in lines if line.startswith(("fatal: ", "error: "))), lines[0] if lines else "no message"
        )


def git(
    *args: str | Path,
    cwd: Path,
    date: datetime | None = None,
    messages: bool = False,
    env: Mapping[str, str] | None = None,
    given: str = "",
) -> str:
    """Run git without the user's and the system's configuration and return what it prints.

    Committer and dates are fixed, so that the same input gives the same commit.
    ``messages`` returns what git says on its standard error instead; ``env`` adds GIT_* variables; git reads ``given``.
    """
    fixed_env = plain_environment()
    if date:
        fixed_env |= {f"GIT_{role}_DATE": date.isoformat() for role in ("AUTHOR", "COMMITTER")}
    # Windows-style checkouts, hooks and signing of the user's own must not change what is built.
    fixed = ["-c", "core.autocrlf=false", "-c", f"core.hooksPath={os.devnull}", "-c", "init.defaultBranch=main"]
    return _run(["git", *fixed, *map(str, args)], cwd, fixed_env | dict(env or {}), given)[messages]


def git_as_user(*args: str | Path, cwd: Path) -> str:
    """Run git with the user's configuration: credentials, proxies and URL rewrites for a remote."""
    return _run(["git", *map(str, args)], cwd, _clean_environment())[0]


def plain_environment() -> dict[str, str]:
    """The environment without the user's and the system's git configuration, for programs that run git themselves."""
    env = _clean_environment() | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{role}_NAME"], env[f"GIT_{role}_EMAIL"] = IDENTITY
    return env


def _clean_environment() -> dict[str, str]:
    # A hook or a rebase that calls us exports GIT_DIR and the like, which would aim git at another repository.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_SSH")}
    return env | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}


def _run(command: list[str], cwd: Path, env: dict[str, str], given: str = "") -> tuple[str, str]:
    try:
        done = subprocess.run(command, cwd=cwd, env=env, input=given.encode(), capture_output=True, check=False)
    except (FileNotFoundError, NotADirectoryError) as e:
        # The same exception says that there is no folder to run it in.
        if not cwd.is_dir():
            raise GitError(f"{cwd} is no folder") from e
        raise UserError("git is not installed: install it with the system's package manager") from None
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    if done.returncode:
        if os.strerror(errno.ENOSPC) in err:
            # What the caller asked says nothing about a full disk.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cwd))
        raise GitError((err + out).strip())
    return out, err
