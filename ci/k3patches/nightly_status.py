"""A release's column of the status table, on its way from the job that measures it to the one that commits it.

Whoever wrote the file may have run anything: all that is taken from it is how many tests passed and failed, and
whatever else it says must be what the checkout that is committed says as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from k3patches import base as bases
from k3patches import contracts, series, status, tracking
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.status import Inputs, Table

FILE = status.FILE
README = "README.md"
# How much of a file may come back; one column is some KiB.
LARGEST = 1 << 20
VERSION = re.compile(r"\d[\w.+-]{0,40}", re.ASCII)


def command(root: Path, release: str, folder: Path, options: Sequence[str]) -> list[str]:
    """What measures ``release`` and leaves the file in ``folder``, also where a cell is broken."""
    script = str(root / "ci" / "status.sh")
    return [script, "--base", release, "--json", str(folder / FILE), "--write-broken", *options]


def add(root: Path, release: str, folder: Path) -> list[str]:
    """Put what ``folder`` holds of ``release`` into the table of the checkout ``root``, which has its series already.

    Returns, in words, what must not be shipped; nothing is written then.
    """
    project = Project(root)
    where = project.series_dir(release)
    base, patches = bases.load(where), series.load(where)
    measured = _read(folder / FILE)
    _check(measured, project, release, Inputs.of(base, patches, root / "tests" / "contracts"), folder / FILE)
    column = measured.columns[release]
    if column.patches != status.by_fix(patches):
        raise UserError(f"{folder / FILE} names other patches than the series of vLLM {release} has: rebase again")
    if found := status.findings(column.verdicts, base, patches):
        return found
    place = root / "patches" / FILE
    table = status.read(place).with_columns(measured, project.releases)
    # Whatever may be wrong with them is told before the first is written.
    for path, text in {**tracking.pages(project, table), place: table.to_json()}.items():
        path.write_text(text, encoding="utf-8")
    return []


def _read(path: Path) -> Table:
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path} is missing, so there is nothing for the status table: rebase again")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is too large for a status table: look at it, and rebase again")
    return status.read(path)


def _check(measured: Table, project: Project, release: str, today: Inputs, path: Path) -> None:
    """See that ``measured`` is of this release, series and contracts, and of nothing else."""
    wrong = []
    if list(measured.columns) != [release]:
        wrong.append(f"it is of {', '.join(map(repr, measured.columns)) or 'no release'}")
    else:
        column = measured.columns[release]
        wrong += [f"{what} changed since" for what in column.inputs.changed(today)]
        if [v.fix for v in column.verdicts] != contracts.fixes(project.root / "tests" / "contracts"):
            wrong.append("its fixes are not those that have a contract")
        if any(v.pristine.not_run or v.patched.not_run for v in column.verdicts):
            wrong.append("a contract was cut short")
    if measured.revision != project.revision:
        wrong.append(f"its revision is {measured.revision} and not {project.revision}")
    if set(measured.ran_on) != {"python", "torch"} or not all(map(VERSION.fullmatch, measured.ran_on.values())):
        wrong.append("it does not say which Python and torch it ran on")
    if wrong:
        raise UserError(
            f"{path} is no status of vLLM {release} as it is to be committed: {'; '.join(wrong)}; rebase again"
        )
