"""The page patches/TRACKING.md: for each fix where it stands on each release, and upstream, and when its patch may go.

It is written of the status table, of the series, and of patches/pr/known.toml, which has what is known of upstream's
pull requests and issues; nothing in it is kept by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3patches import contracts, series, status_readme
from k3patches.contracts import State
from k3patches.errors import UserError
from k3patches.pr import known
from k3patches.pr import page as pull_requests
from k3patches.pr.known import Ground
from k3patches.project import Project
from k3patches.series import Patch
from k3patches.status import Table

PAGE = "TRACKING.md"
HEAD = f"""\
# Tracking

<!-- written by ci/status.sh: edit pr/{known.FILE}, and run ci/status.sh --pages -->

Where each fix stands on each release and upstream. A patch goes from a base's series when the fix's contract passes
on the pristine release, which is what *native* means, and not before, whatever was merged; `ci/status.sh` and
`ci/rebase.sh` decide it by running the contracts. Upstream-Status is in Yocto's words and stands in the patch itself.
What is said of a pull request or an issue is what it is about; where it stands today, its page tells.
What is best sent first is in [PULL_REQUESTS]({pull_requests.PAGE}).
"""


def pages(project: Project, table: Table) -> dict[Path, str]:
    """What this table is read in: README.md, with the table in it, and the pages."""
    readme, folder = project.root / "README.md", project.root / "patches"
    text = status_readme.place(readme.read_text(encoding="utf-8"), table)
    release = list(table.columns)[-1]
    grounds = grounds_of(project, table.fixes)
    order = pull_requests.page(release, series.load(project.series_dir(release)), grounds)
    return {readme: text, folder / PAGE: page(project, table), folder / pull_requests.PAGE: order}


def require_current(project: Project, table: Table) -> None:
    """See that the pages are those of this table."""
    for path, text in pages(project, table).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} is not what the status table says: run ci/status.sh --pages and commit it")


def grounds_of(project: Project, fixes: Sequence[str]) -> dict[str, Ground]:
    """What is known of upstream, by fix; it must be of these and no others."""
    grounds = known.load(project.root / "patches" / "pr")
    if missing := [fix for fix in fixes if fix not in grounds]:
        raise UserError(
            f"patches/pr/{known.FILE} has no table for {', '.join(missing)}: add [{missing[0]}] with a symptom, a "
            f"harm, and what upstream is known to do about it"
        )
    if unknown := sorted(grounds.keys() - set(fixes)):
        raise UserError(f"patches/pr/{known.FILE} has a table for {unknown[0]}, which is no fix: mend its name")
    if bare := [fix for fix in fixes if not (grounds[fix].harm and grounds[fix].symptom)]:
        harms = ", ".join(f'"{harm.value}"' for harm in known.Harm)
        raise UserError(
            f"patches/pr/{known.FILE} does not say what users have without {bare[0]}: give it a symptom, in one "
            f"sentence, and a harm, one of {harms}"
        )
    return grounds


def page(project: Project, table: Table) -> str:
    """The page's text for this table."""
    grounds = grounds_of(project, table.fixes)
    patches = {r: {p.name: p for p in series.load(project.series_dir(r))} for r in table.columns}
    parts = [HEAD, _overview(table)]
    parts += [_section(fix, table, patches, grounds[fix]) for fix in table.fixes]
    return "\n".join(parts)


def _states(fix: str, table: Table) -> dict[str, State]:
    return {r: v.state for r, column in table.columns.items() for v in column.verdicts if v.fix == fix}


def _overview(table: Table) -> str:
    lines = ["| fix | patched on | native on |", "|---|---|---|"]
    for fix in table.fixes:
        states = _states(fix, table)
        cells = [_runs(states, state) or "none" for state in (State.PATCHED, State.NATIVE)]
        lines.append(f"| [`{fix}`](#{fix}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _section(fix: str, table: Table, patches: dict[str, dict[str, Patch]], ground: Ground) -> str:
    states = _states(fix, table)
    lines = [f"## {fix}", "", "| release | state | patch | Upstream-Status |", "|---|---|---|---|"]
    for release, state in states.items():
        mine = [patches[release][n] for n in table.columns[release].patches.get(fix, ()) if n in patches[release]]
        names = ", ".join(f"[{p.name}](v{release}/{p.name})" for p in mine)
        upstream = ", ".join(dict.fromkeys(p.upstream_status for p in mine))
        lines.append(f"| {release} | {state.value} | {names} | {upstream} |")
    lines += ["", _when(fix, states), "", *_upstream(ground)]
    return "\n".join(lines) + "\n"


def _when(fix: str, states: dict[str, State]) -> str:
    """When the patch may go, or since when it has gone."""
    newest = list(states)[-1]
    contract = f"[its contract](../tests/contracts/{contracts.contract_file(fix)})"
    needed = _runs(states, State.PATCHED)
    if not needed:
        return f"No patch is needed: {contract} passes on every pristine release."
    native = _runs(states, State.NATIVE)
    if states[newest] is State.PATCHED:
        gap = f" It was native on {native} and is needed again since." if native else ""
        return f"The patch goes with the first release after {newest} that passes {contract} by itself.{gap}"
    since = next(r for i, r in enumerate(states) if State.PATCHED not in list(states.values())[i:])
    if states[newest] is State.NATIVE:
        return f"Native since {since}, where the patch has gone: {contract} passes there by itself."
    return f"Not needed since {since}, where the patch has gone: {newest} is {states[newest].value}."


def _upstream(ground: Ground) -> list[str]:
    if not ground.entries:
        return ["Upstream: nothing on the same ground is known."]
    words = {"pull": "pull request", "issue": "issue"}
    return ["Upstream:", "", *(f"- {words[e.kind]} [{e.number}]({e.link}): {e.what}" for e in ground.entries)]


def _runs(states: dict[str, State], wanted: State) -> str:
    """The releases in that state, those that follow each other as a range."""
    runs: list[list[str]] = []
    before: State | None = None
    for release, state in states.items():
        if state is wanted:
            if before is not wanted:
                runs.append([])
            runs[-1].append(release)
        before = state
    return ", ".join(_range(run) for run in runs)


def _range(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
