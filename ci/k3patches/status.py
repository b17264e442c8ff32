"""What is known of every fix on every base: the table, its JSON form, and whether it is today's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3patches import base as bases
from k3patches import contracts, series
from k3patches.base import Base
from k3patches.contracts import Outcome, State, Verdict
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.series import Patch

FILE = "status.json"
AGAIN = "run ci/status.sh"


@dataclass(frozen=True)
class Origin:
    """What was run, of a base; ``torch`` is the version that the release pins."""

    commit: str
    torch: str
    sdist_sha256: str
    series_sha256: str

    @classmethod
    def of_series(cls, base: Base, patches: Sequence[Patch]) -> Origin:
        return Origin(base.commit, base.torch, base.sdist.sha256, series_digest(patches))

    def changed(self, today: Origin) -> list[str]:
        """In words, what is not as it was."""
        names = {
            "series_sha256": "its series",
            "contracts_sha256": "the contracts",
            "sdist_sha256": "its sdist",
            "commit": "its commit",
            "torch": "its torch",
        }
        return [word for name, word in names.items() if getattr(self, name, None) != getattr(today, name, None)]


@dataclass(frozen=True)
class Inputs(Origin):
    """What the states of a base follow from."""

    contracts_sha256: str

    @classmethod
    def of(cls, base: Base, patches: Sequence[Patch], folder: Path) -> Inputs:
        return cls(**asdict(Origin.of_series(base, patches)), contracts_sha256=contracts.digest(folder))


@dataclass(frozen=True)
class Column:
    """One base: how each fix does, and by which patches."""

    inputs: Inputs
    verdicts: Sequence[Verdict]
    patches: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """``columns`` goes by release, oldest first; ``ran_on`` says which Python and torch ran the contracts."""

    revision: int
    ran_on: Mapping[str, str]
    columns: Mapping[str, Column]

    @property
    def fixes(self) -> list[str]:
        return sorted({v.fix for column in self.columns.values() for v in column.verdicts})

    def to_dict(self) -> dict[str, Any]:
        entries = {release: _column_to_dict(column) for release, column in self.columns.items()}
        return {"revision": self.revision, "ran_on": dict(self.ran_on), "bases": entries}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def with_columns(self, other: Table, releases: Sequence[str]) -> Table:
        """This one with the columns of ``other`` in place of its own; only ``releases`` stay."""
        merged = dict(self.columns) | dict(other.columns)
        return Table(other.revision, other.ran_on, {r: merged[r] for r in releases if r in merged})


def read(path: Path) -> Table:
    """The table that :meth:`Table.to_json` wrote; whatever else is in the file is an error."""
    try:
        data = json.loads(path.read_text())
        columns = {release: _column_from_dict(entry) for release, entry in data["bases"].items()}
        table = Table(_whole(data["revision"]), {name: _text(told) for name, told in data["ran_on"].items()}, columns)
        if table.to_dict() != data:
            raise ValueError("it has entries of another kind")
        return table
    except FileNotFoundError:
        raise UserError(f"{path} is not there: {AGAIN}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{path} is no status table ({type(e).__name__}: {e}): delete it and {AGAIN}") from None


def findings(verdicts: Sequence[Verdict], base: Base, patches: Sequence[Patch]) -> list[str]:
    """What of a base must not be shipped, in words."""
    named = {fix for patch in patches for fix in patch.contracts}
    recorded = dict.fromkeys(base.native, State.NATIVE) | dict.fromkeys(base.absent, State.ABSENT)
    found = []
    for v in verdicts:
        if v.state is State.BROKEN:
            how = str(v.patched) if v.pristine.ran else f"{v.pristine} on the pristine tree"
            found.append(f"{v.fix} is broken ({how})")
        elif v.fix in named and v.state is not State.PATCHED:
            found.append(f"{v.fix} holds without its patch ({v.state.value})")
        elif v.fix in recorded and recorded[v.fix] is not v.state:
            found.append(f"{v.fix} is {v.state.value}, but {bases.FILE} says {recorded[v.fix].value}")
    return found


def by_fix(patches: Sequence[Patch]) -> dict[str, list[str]]:
    """The names of each fix's patches."""
    found: dict[str, list[str]] = {}
    for patch in patches:
        for fix in patch.contracts:
            found.setdefault(fix, []).append(patch.name)
    return found


def series_digest(patches: Sequence[Patch]) -> str:
    """A checksum of the patches, in their order."""
    return hashlib.sha256("".join(f"{p.name} {p.sha256}\n" for p in patches).encode()).hexdigest()


def stale(table: Table, project: Project, folder: Path) -> list[str]:
    """What was not measured as it is today, in words; nothing runs for that.  ``folder`` holds the contracts."""
    found = []
    if table.revision != project.revision:
        found.append(f"the revision was {table.revision} and is {project.revision}")
    for release in project.releases:
        where = project.series_dir(release)
        today = Inputs.of(bases.load(where), series.load(where), folder)
        if release not in table.columns:
            found.append(f"{release} was not measured")
        elif changed := table.columns[release].inputs.changed(today):
            found.append(f"{release}: {', '.join(changed)} changed since")
    found += [f"{release} has no series" for release in table.columns if release not in project.releases]
    return found


def differences(committed: Table, measured: Table) -> list[str]:
    """Where two tables tell of other behaviour, in words."""
    found = []
    for release, column in measured.columns.items():
        if release not in committed.columns:
            found.append(f"{release} is missing")
            continue
        before = {v.fix: v for v in committed.columns[release].verdicts}
        for v in column.verdicts:
            if v.fix not in before:
                found.append(f"{release}: {v.fix} is missing")
            elif before[v.fix] != v:
                found.append(f"{release}: {v.fix} was {_told(before[v.fix])} and is {_told(v)}")
        gone = before.keys() - {v.fix for v in column.verdicts}
        found += [f"{release}: {fix} has no contract" for fix in sorted(gone)]
        if column.patches != committed.columns[release].patches:
            found.append(f"{release}: other patches")
    return found


def _told(v: Verdict) -> str:
    return f"{v.state.value} (pristine {v.pristine}; patched {v.patched})"


def _column_to_dict(column: Column) -> dict[str, Any]:
    fixes = {
        v.fix: {
            "state": v.state.value,
            "patches": list(column.patches.get(v.fix, ())),
            "pristine": asdict(v.pristine),
            "patched": asdict(v.patched),
        }
        for v in column.verdicts
    }
    return asdict(column.inputs) | {"fixes": fixes}


def _column_from_dict(entry: Mapping[str, Any]) -> Column:
    inputs = Inputs(**{k: _text(v) for k, v in entry.items() if k != "fixes"})
    verdicts, patches = [], {}
    for fix, told in entry["fixes"].items():
        verdict = Verdict(fix, _outcome(told["pristine"]), _outcome(told["patched"]))
        if verdict.state.value != told["state"]:
            raise ValueError(f"{fix} is {told['state']}, but its counts say {verdict.state.value}")
        verdicts.append(verdict)
        if told["patches"]:
            patches[fix] = [_text(name) for name in told["patches"]]
    return Column(inputs, verdicts, patches)


def _outcome(told: Mapping[str, Any]) -> Outcome:
    return Outcome(**{kind: _whole(number) for kind, number in told.items()})


def _whole(number: Any) -> int:
    # To Python, true is a number too.
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no whole number")
    return number


def _text(told: Any) -> str:
    if not isinstance(told, str):
        raise ValueError(f"{told!r} is no text")
    return told
