"""Which base a tree is nearest to, by the files that the bases' patches change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3patches import series
from k3patches.git import git
from k3patches.project import Project
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG


@dataclass(frozen=True)
class Fit:
    """Of the ``files`` of a release that its series changes, ``same`` are in the tree as they are."""

    release: str
    same: int
    files: int

    def __str__(self) -> str:
        return f"vLLM {self.release}: {self.same} of the {self.files} files that its series changes are as there"


def best(project: Project, tree: Path) -> Fit:
    """The base whose files the pristine ``tree`` has most of; of two that fit alike, the newer one."""
    listed = git("ls-tree", "-r", "-z", PRISTINE_TAG, cwd=tree).split("\0")
    blobs = {path: what.split()[2] for what, _, path in (entry.partition("\t") for entry in listed if entry)}
    fits = []
    for release in project.releases:
        wanted = _preimages(series.load(project.series_dir(release)))
        same = sum(blobs.get(path) == blob for path, blob in wanted.items())
        fits.append(Fit(release, same, len(wanted)))
    return max(reversed(fits), key=lambda fit: fit.same / fit.files if fit.files else 0.0)


def _preimages(patches: Sequence[Patch]) -> dict[str, str]:
    """The blobs of the release's own files that a series changes, by path."""
    first: dict[str, str] = {}
    for patch in patches:
        for path, blob in patch.preimages.items():
            first.setdefault(path, blob)
    return {path: blob for path, blob in first.items() if blob.strip("0")}
