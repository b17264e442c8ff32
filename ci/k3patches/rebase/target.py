"""What the series is carried to: a release, a git ref, or a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from k3patches import base as bases
from k3patches import fetch
from k3patches.base import Base
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.source import Folder, GitCommit, Sdist, Source

UPSTREAM = "https://github.com/vllm-project/vllm"
RELEASE = re.compile(r"v?(\d+(?:\.\d+)+(?:\.?(?:rc|a|b|post)\d+)?)")


@dataclass(frozen=True)
class Target:
    """``name`` is the folder's name in build/rebase, ``label`` what people call it; ``release`` if it is one.

    ``version`` places it among the bases; a git ref or a folder may have none, and is placed by what it is like.
    """

    name: str
    label: str
    wanted: str
    release: str | None
    version: Version | None
    git: str | None = None

    def source(self, project: Project, base: Base | None, cache: Path) -> Source:
        if base:
            return Sdist(fetch.fetch(base.sdist, cache), base.sdist.sha256)
        if self.git:
            return GitCommit.resolve(self.git, self.wanted, project.root / "build" / "git")
        return Folder(Path(self.wanted))


def parse(wanted: str, git: str | None) -> Target:
    """What the user means by ``wanted``."""
    match = RELEASE.fullmatch(wanted)
    if git is None and Path(wanted).is_dir():
        path = Path(wanted).resolve()
        # The folder of a release's sdist is called vllm-0.28.0, which must not take v0.28.0's place.
        return Target(_name(path.name), f"folder {path.name}", str(path), None, _version(path))
    if git is None and match:
        release = match[1]
        return Target(f"v{release}", f"vLLM {release}", release, release, Version(release))
    if git is None and ("/" in wanted and wanted.startswith((".", "/"))):
        raise UserError(f"{wanted} is no folder: name a release such as 0.28.0, a git ref, or a folder of vLLM source")
    version = Version(match[1]) if match else None
    short = wanted[:12] if re.fullmatch(r"[0-9a-f]{40,64}", wanted) else wanted
    # A tag is not the release: it has no sdist and no wheel, and must not take the release's place either.
    return Target(f"git-{_name(short)}", f"vLLM {short}", wanted, None, version, git or UPSTREAM)


def pinned(project: Project, target: Target) -> Base | None:
    """What the committed base.toml pins of the target, where there is one."""
    if target.release and target.release in project.releases:
        return bases.load(project.series_dir(target.release))
    return None


def nearest(project: Project, target: Target, wanted: str | None) -> list[str]:
    """The bases to carry from, nearest first: the target's older ones, or ``wanted`` and those older than that.

    Where nothing says how old the target is, they are all.
    """
    releases = project.releases
    if wanted:
        if wanted not in releases:
            raise UserError(f"no series for vLLM {wanted}: --from takes one of {', '.join(releases)}")
        if wanted == target.release:
            raise UserError(f"--from {wanted} is the target itself: name another base")
        return [r for r in reversed(releases) if Version(r) <= Version(wanted) and r != target.release]
    older = [r for r in reversed(releases) if target.version is None or Version(r) < target.version]
    if target.release is None and target.version is not None and str(target.version) in releases:
        # The same source by another way is best served by its own series.
        older.insert(0, str(target.version))
    if not older:
        raise UserError(
            f"no base is older than {target.label}: name one with --from; there are {', '.join(releases) or 'none'}"
        )
    return older


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "target"


def _version(folder: Path) -> Version | None:
    """The version that an unpacked sdist says it is."""
    info = folder / "PKG-INFO"
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    match = re.search(r"^Version: (\S+)$", text, re.M)
    try:
        return Version(match[1]) if match else None
    except InvalidVersion:
        return None
