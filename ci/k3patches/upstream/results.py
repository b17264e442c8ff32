"""What is known of upstream's own tests on every base: a JSON file, and whether it is today's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3patches import base as bases
from k3patches import series
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.status import Origin
from k3patches.upstream.sides import Comparison, Outcomes

FILE = "upstream-tests.json"
OUTCOMES = tuple(Outcomes().counts())
AGAIN = "run ci/upstream-tests.sh"


@dataclass(frozen=True)
class Entry:
    """One base: how many test files were run, how many tests went how on each side, and what turned."""

    origin: Origin
    files: int
    pristine: Mapping[str, int]
    patched: Mapping[str, int]
    turned: Mapping[str, str]

    @classmethod
    def of(cls, origin: Origin, files: Sequence[str], comparison: Comparison) -> Entry:
        turned = {t.test: f"{t.patched.outcome}: {t.patched.error}" for t in comparison.turned}
        return cls(origin, len(files), comparison.pristine.counts(), comparison.patched.counts(), turned)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.origin) | {k: v for k, v in asdict(self).items() if k != "origin"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        names = Origin.__dataclass_fields__.keys()
        entry = cls(Origin(**{n: data[n] for n in names}), **{k: v for k, v in data.items() if k not in names})
        numbers = [entry.files, *entry.pristine.values(), *entry.patched.values()]
        texts = [*asdict(entry.origin).values(), *entry.turned.values()]
        if any(sorted(counts) != sorted(OUTCOMES) for counts in (entry.pristine, entry.patched)):
            raise ValueError("it counts something else")
        if any(type(n) is not int or n < 0 for n in numbers) or any(not isinstance(t, str) for t in texts):
            raise ValueError("it has entries of another kind")
        return entry


def read(path: Path) -> dict[str, Entry]:
    """The entries by release."""
    try:
        return {release: Entry.from_dict(data) for release, data in json.loads(path.read_text())["bases"].items()}
    except FileNotFoundError:
        raise UserError(f"{path} is not there: {AGAIN}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{path} holds no such results ({type(e).__name__}: {e}): delete it and {AGAIN}") from None


def to_json(entries: Mapping[str, Entry], releases: Sequence[str]) -> str:
    data = {release: entries[release].to_dict() for release in releases if release in entries}
    return json.dumps({"bases": data}, indent=1) + "\n"


def stale(entries: Mapping[str, Entry], project: Project, releases: Sequence[str]) -> list[str]:
    """What of ``releases`` was not run as it is today, in words."""
    changes = []
    for release in releases:
        where = project.series_dir(release)
        today = Origin.of_series(bases.load(where), series.load(where))
        if release not in entries:
            changes.append(f"{release} was not run")
        elif changed := entries[release].origin.changed(today):
            changes.append(f"{release}: {', '.join(changed)} changed since")
    return changes


def require(project: Project, releases: Sequence[str]) -> None:
    """See that the committed results are of today, and that nothing turned."""
    entries = read(project.root / "patches" / FILE)
    if old := stale(entries, project, releases):
        raise UserError(f"the results of upstream's tests are not of today: {'; '.join(old)}; {AGAIN} and commit them")
    for release in releases:
        if turned := entries[release].turned:
            raise UserError(
                f"vLLM {release}: {_number(turned)} of upstream's that passes on the release fails with the series, "
                f"{next(iter(turned))}: mend that first"
            )


def _number(turned: Mapping[str, str]) -> str:
    return "a test" if len(turned) == 1 else f"each of {len(turned)} tests"
