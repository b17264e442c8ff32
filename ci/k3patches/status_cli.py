"""The command ``table``, behind ci/status.sh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from k3patches import base as bases
from k3patches import contracts, fetch, files, series, status, status_readme, tracking
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.source import Sdist
from k3patches.status import AGAIN, Table
from k3patches.status_run import Run, Subject

FILE_TYPE = click.Path(path_type=Path)
EXAMPLES = """
\b
  ci/status.sh                          run everything, write README.md, patches/status.json and patches/TRACKING.md
  ci/status.sh --base 0.33.0            only this base, the others' results stay
  ci/status.sh --check                  run everything and compare with what is committed
  ci/status.sh --current                run nothing: is what is committed of today's series and contracts?
  ci/status.sh --pages                  run nothing: write README.md and patches/TRACKING.md anew
  ci/status.sh --from build/status.json write what an earlier run measured, that of ci/test.sh for instance
  ci/status.sh --base 0.33.0 --json F   write this base's results to F, and leave README.md alone
"""


@click.command("table", epilog=EXAMPLES)
@click.option("--base", "chosen", multiple=True, metavar="X.Y.Z", help="Only this base; may be repeated.")
@click.option("--json", "json_file", type=FILE_TYPE, help=f"Another file than patches/{status.FILE}; README.md stays.")
@click.option("--check", is_flag=True, help="Write neither README nor JSON: fail where they tell of something else.")
@click.option("--current", is_flag=True, help="Run nothing: fail where series or contracts changed since.")
@click.option("--pages", is_flag=True, help="Run nothing: write README.md and TRACKING.md of the table as it is.")
@click.option("--from", "earlier", type=FILE_TYPE, help="Run nothing: take an earlier run's JSON, if it is of today's.")
@click.option("--thorough", is_flag=True, help="Also each patch's contracts on the series up to it, and its own tests.")
@click.option("--write-broken", is_flag=True, help="Write the table also where it has broken cells.")
@click.option("--jobs", type=click.IntRange(1), default=contracts.PARALLEL, show_default=True, help="Runs at a time.")
@click.option("--cache", type=FILE_TYPE, help="Folder of downloads. [default: the user's cache]")
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def table_command(
    chosen: Sequence[str],
    json_file: Path | None,
    check: bool,
    current: bool,
    pages: bool,
    earlier: Path | None,
    thorough: bool,
    write_broken: bool,
    jobs: int,
    cache: Path | None,
    python: str,
) -> None:
    """Say which fix is native, patched or absent on which base, as the contracts find it.

    Runs all contracts on the pristine and the patched tree of every base, and writes the table
    into README.md, with the counts to patches/status.json, and with what is known of upstream to
    patches/TRACKING.md.  A broken fix is an error, and nothing is written then.
    """
    if sum((check, current, pages, earlier is not None)) > 1:
        raise UserError("--check, --current, --pages and --from are four things to do: give one of them")
    if (current or pages or earlier) and (chosen or thorough):
        raise UserError("--base and --thorough say what to run, and you ask to run nothing: leave them out")
    project = Project.find()
    folder = project.root / "tests" / "contracts"
    place = json_file or project.root / "patches" / status.FILE
    if current:
        _require_current(project, folder, status.read(place))
        tracking.require_current(project, status.read(place))
        return
    if not json_file:
        # Told now, and not when all contracts have run.
        tracking.grounds_of(project, contracts.fixes(folder))
    with project.lock():
        if pages:
            table = status.read(place)
            _require_current(project, folder, table)
            for page, text in tracking.pages(project, table).items():
                files.write(page, text)
            return
        if earlier:
            table = status.read(earlier)
            if old := status.stale(table, project, folder):
                raise UserError(f"{earlier} is not of today: {'; '.join(old)}; {AGAIN}")
            # What is written is as good as what a run would write.
            wrong = []
            for release in project.releases:
                found = status.findings(table.columns[release].verdicts, *_pinned(project, release))
                wrong += [f"vLLM {release}: {what}" for what in found]
        else:
            table, wrong = _measure(project, folder, chosen, cache, Run(project, folder, python, jobs), thorough)
        click.echo(status_readme.render(table))
        if check and not wrong:
            committed = status.read(place)
            if found := status.differences(committed, table):
                raise UserError(f"{place} differs from what was measured: {'; '.join(found)}; {AGAIN} and commit it")
            if not chosen:
                _require_current(project, folder, committed)
                tracking.require_current(project, committed)
            return
        if not check and (write_broken or not wrong):
            if chosen and place.is_file():
                table = status.read(place).with_columns(table, project.releases)
            written = {place: table.to_json()}
            if not json_file:
                # The pages are of the table in patches/status.json.
                written |= tracking.pages(project, table)
            for path, text in written.items():
                files.write(path, text)
            click.echo(f"written: {', '.join(map(str, written))}", err=True)
    if wrong:
        what = "written nevertheless" if write_broken and not check else "nothing is written"
        raise UserError(f"{'; '.join(wrong)}; {what}: mend them, pytest tests/contracts --tree TREE shows them alone")


def _measure(
    project: Project, folder: Path, chosen: Sequence[str], cache: Path | None, run: Run, thorough: bool
) -> tuple[Table, list[str]]:
    subjects = []
    for release in chosen:
        project.series_dir(release)
    for release in project.releases:
        if chosen and release not in chosen:
            continue
        base, patches = _pinned(project, release)
        path = fetch.fetch(base.sdist, cache or fetch.default_cache())
        subjects.append(Subject(base, patches, Sdist(path, base.sdist.sha256)))
    table = run.table(subjects, thorough)
    # For --from, and to look into.
    files.write(project.root / "build" / status.FILE, table.to_json())
    for line in run.details(table):
        click.echo(line, err=True)
    return table, run.wrong


def _pinned(project: Project, release: str) -> tuple[bases.Base, list[series.Patch]]:
    where = project.series_dir(release)
    return bases.load(where), series.load(where)


def _require_current(project: Project, folder: Path, table: Table) -> None:
    if old := status.stale(table, project, folder):
        raise UserError(f"the status table is not of today: {'; '.join(old)}; {AGAIN} and commit what it writes")
