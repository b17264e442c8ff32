"""Since which release a fix needs no patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3patches import base as bases
from k3patches import series
from k3patches.contracts import Outcome
from k3patches.project import Project


def since(
    project: Project, release: str, older: Sequence[str], outcomes: Mapping[str, Outcome]
) -> tuple[dict[str, str], dict[str, str]]:
    """By fix, the release since which it is native, and since which it is absent.

    ``older`` are the bases before ``release``, newest first, and ``outcomes`` those of its pristine source.
    Without a word of a fix in any older base, it has been so since the oldest one without a patch for it.
    """
    native: dict[str, str] = {}
    absent: dict[str, str] = {}
    known = [bases.load(project.series_dir(name)) for name in older]
    named = {b.release: {f for p in series.load(project.series_dir(b.release)) for f in p.contracts} for b in known}
    for fix, outcome in outcomes.items():
        if not outcome.holds and not outcome.is_absent:
            continue
        table = native if outcome.holds else absent
        table[fix] = release
        for base in known:
            told, other = (base.native, base.absent) if outcome.holds else (base.absent, base.native)
            if fix in other or fix in named[base.release]:
                break
            table[fix] = told.get(fix, base.release)
            if fix in told:
                break
    return native, absent
