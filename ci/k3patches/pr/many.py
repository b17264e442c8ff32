"""Exports of a whole series: one after the other, and a table of what came out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from k3patches import files
from k3patches.errors import UserError
from k3patches.pr import place
from k3patches.pr.desk import Desk
from k3patches.pr.export import Done, Export
from k3patches.pr.runs import Results
from k3patches.rebase.errors import NeedsPerson
from k3patches.series import Patch

# The exit code where a branch was made and nothing could be run on it.
NOT_RUN = 6
# Of the table in a log.
WIDTH = 180
# What is tried of a branch beyond its export: words on how it went, or an error.
Trial = Callable[[Desk, Patch], str]


@dataclass(frozen=True)
class Row:
    """One patch; ``why`` is the error, where there was one, and ``trip`` how the way back went, where it was tried."""

    patch: str
    code: int
    commit: str = ""
    below: int = 0
    format: str = ""
    tests: tuple[str, str] = ("", "")
    contracts: tuple[str, str] = ("", "")
    hooks: list[str] = field(default_factory=list)
    trip: str = ""
    why: str = ""


def export_all(desk: Desk, patches: Sequence[Patch], trial: Trial | None) -> list[Row]:
    """Export one after the other; what stops one stops only those that depend on it."""
    rows: dict[str, Row] = {}
    for patch in patches:
        rows[patch.name] = _export(desk, patch, trial, {name for name, row in rows.items() if row.why})
    return list(rows.values())


def _export(desk: Desk, patch: Patch, trial: Trial | None, stopped: Collection[str]) -> Row:
    export = Export(desk, patch)
    try:
        if waits := [other.name for other in export.below() if other.name in stopped]:
            raise NeedsPerson(f"it depends on {waits[0]}, which is to be exported first")
        done = export.run()
        trip = trial(desk, patch) if trial else ""
    except UserError as e:
        click.echo(f"{patch.name}: {e.message}", err=True)
        return Row(patch.name, int(e.exit_code), why=e.message)
    if not trial:
        tell(desk, done)
    return _row(patch, done.record.commit, done.below, done.results, trip)


def _row(patch: Patch, commit: str, below: int, results: Results, trip: str) -> Row:
    sides = [[pair[side] for pair in results.contracts.values()] for side in (0, 1)]
    before, after = ("; ".join(map(str, side)) for side in sides)
    return Row(
        patch.name,
        NOT_RUN if results.without else 0,
        commit,
        below,
        "not run" if results.unformatted is None else "; ".join(results.unformatted) or "ok",
        ("", "") if results.without else (str(results.tests[0]), str(results.tests[1])),
        (before, after),
        results.hooks,
        trip,
    )


def show(desk: Desk, rows: Sequence[Row]) -> None:
    """Print the table for a person."""
    columns = ["patch", "below", "format", "own tests without it", "with it", "contracts without it", "with it"]
    table = Table(*columns, title=f"onto {desk.upstream.label}", title_justify="left")
    for row in rows:
        name = row.patch.removesuffix(".patch")
        if row.why:
            table.add_row(name, "", f"exit code {row.code}, see above")
        else:
            formatted = row.format + (f", {len(row.hooks)} hooks' findings" if row.hooks else "")
            table.add_row(name, str(row.below or ""), formatted, *row.tests, *row.contracts)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)
    for row in rows:
        if row.trip:
            click.echo(f"{row.patch}: there and back, {row.trip}")
        for finding in row.hooks:
            click.echo(f"{row.patch}: {finding}")


def write(path: Path, desk: Desk, rows: Sequence[Row]) -> None:
    data = {"base": desk.release, "onto": desk.upstream.label, "patches": [asdict(row) for row in rows]}
    files.write_json(path, data)


def tell(desk: Desk, done: Done) -> None:
    """Say where a branch is, and what is left to a person."""
    where = desk.shown(done.folder)
    branch = f"{done.record.branch} in {done.record.gitdir}" if done.record.gitdir else f"{where / place.TREE}"
    state = "unchanged" if done.unchanged else "written"
    click.echo(f"{done.record.patch}: {state}, {branch} ({done.record.commit[:12]}), {where / place.DESCRIPTION}")
    if done.unknown:
        click.echo(f"  left to be filled in: {', '.join(done.unknown)}", err=True)
    for finding in done.results.hooks:
        click.echo(f"  left to do for upstream's pre-commit: {finding}", err=True)
    if done.results.without:
        click.echo(f"  neither tests nor contracts were run: {done.results.without}", err=True)
