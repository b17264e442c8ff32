"""What a nightly run looks at: the releases that have no series yet, and vLLM's main."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from k3patches import releases
from k3patches.errors import UserError
from k3patches.git import GitError, git_as_user
from k3patches.index import PipConfig
from k3patches.project import Project

UPSTREAM = "https://github.com/vllm-project/vllm.git"
BRANCH = "main"


@dataclass(frozen=True)
class Target:
    """What the engine is run for: a release, or a branch of ``git`` at ``commit``."""

    name: str
    git: str | None = None
    commit: str | None = None

    @property
    def is_release(self) -> bool:
        return self.git is None

    @property
    def label(self) -> str:
        """How people call it."""
        return f"vLLM {self.name}"

    @property
    def arguments(self) -> list[str]:
        """How ci/rebase.sh is told of it.  A branch goes by its commit: it may move while this runs."""
        return [self.name] if self.git is None else [self.commit or self.name, "--git", self.git]


def find(project: Project, config: PipConfig, upstream: str) -> list[Target]:
    """All targets, in the order to run them in: a later release starts from an earlier one's series."""
    new = releases.missing(project.releases, releases.published(config))
    return [*map(Target, new), branch(upstream, project.root)]


def branch(url: str, cwd: Path) -> Target:
    """Where :data:`BRANCH` of the repository at ``url`` is now."""
    if Path(url).exists():
        url = str(Path(url).resolve())
    try:
        told = git_as_user("ls-remote", "--", url, f"refs/heads/{BRANCH}", cwd=cwd)
    except GitError as e:
        raise UserError(f"cannot ask {url} for its {BRANCH} ({e.brief}): check the network, or give --git") from None
    match = re.match(r"([0-9a-f]{40,64})\t", told)
    if not match:
        raise UserError(f"{url} has no branch {BRANCH}: give the URL of a vLLM repository with --git")
    return Target(BRANCH, url, match[1])
