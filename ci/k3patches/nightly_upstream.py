"""A release's results of upstream's own tests, on their way from the job that runs them to the one that commits them.

As with :mod:`k3patches.nightly_status`, nothing is taken from it but counts, and those only if they are of what is
committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3patches import base as bases
from k3patches import series
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.status import Origin
from k3patches.upstream import results

FILE = results.FILE
LARGEST = 1 << 20


def command(root: Path, release: str, folder: Path, options: Sequence[str]) -> list[str]:
    """What runs them for ``release`` and leaves the file in ``folder``, also where a test turned."""
    return [str(root / "ci" / "upstream-tests.sh"), "--base", release, "--json", str(folder / FILE), *options]


def add(root: Path, release: str, folder: Path) -> list[str]:
    """Put what ``folder`` holds of ``release`` into the results of the checkout ``root``, which has its series already.

    Returns, in words, what must not be shipped; nothing is written then.
    """
    project, path = Project(root), folder / FILE
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path} is missing, so nobody knows of upstream's tests: rebase again")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is too large for results of tests: look at it, and rebase again")
    entries = results.read(path)
    where = project.series_dir(release)
    today = Origin.of_series(bases.load(where), series.load(where))
    if list(entries) != [release] or (changed := entries[release].origin.changed(today)):
        why = f"{', '.join(changed)} changed since" if list(entries) == [release] else "they are of another release"
        raise UserError(f"{path} holds no results of vLLM {release} as it is to be committed: {why}; rebase again")
    if turned := len(entries[release].turned):
        return [f"{turned} of upstream's own tests fail with the series (ci/upstream-tests.sh --base {release})"]
    place = root / "patches" / FILE
    known = results.read(place) if place.is_file() else {}
    place.write_text(results.to_json(known | entries, project.releases), encoding="utf-8")
    return []
