"""What is left to do after a series was edited."""

from __future__ import annotations

from k3patches import base as bases
from k3patches import series
from k3patches.project import Project
from k3patches.rebase import plan


def next_steps(project: Project, release: str, fixes: set[str]) -> list[tuple[str, str]]:
    """Commands to run once ``fixes`` changed on ``release``, each with what it is for."""
    releases = project.releases
    older, later = releases[: releases.index(release)], releases[releases.index(release) + 1 :]
    steps, sources = [], {release}
    if older:
        steps.append((f"ci/rebase.sh {release} --record", "note in patches/resolutions what a rebase cannot know"))
    for other in later:
        if fixes & _taken(project, other, sources):
            # What comes after it may take its patch from there.
            sources.add(other)
            steps.append((f"ci/rebase.sh {other}", f"carry it to {other}; with --record, leave that series as it is"))
    return [*steps, ("ci/status.sh", "the table in README.md, patches/status.json and patches/TRACKING.md")]


def _taken(project: Project, release: str, sources: set[str]) -> set[str]:
    """The fixes of which a rebase onto ``release``, where they are needed, takes the patch from one of ``sources``."""
    base = bases.load(project.series_dir(release))
    older = [r for r in reversed(project.releases) if project.releases.index(r) < project.releases.index(release)]
    found = plan.candidates([(name, series.load(project.series_dir(name))) for name in older])
    taken = {fix for candidate in found if candidate.release in sources for fix in candidate.fixes}
    return taken.difference(base.native, base.absent)
