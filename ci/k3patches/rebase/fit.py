"""Which base a tree is nearest to, by the files that the bases' patches change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3patches import series
from k3patches.project import Project
from k3patches.tree import pristine_blobs


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
    blobs = pristine_blobs(tree, ".")
    fits = []
    for release in project.releases:
        wanted = series.preimages(series.load(project.series_dir(release)))
        same = sum(blobs.get(path) == blob for path, blob in wanted.items())
        fits.append(Fit(release, same, len(wanted)))
    return max(reversed(fits), key=lambda fit: fit.same / fit.files if fit.files else 0.0)
