"""The commands ``edit``, ``write-back`` and ``new``, behind ci/edit.sh, ci/refresh.sh and ci/new.sh."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from k3patches import fetch
from k3patches.project import Project
from k3patches.rebase.errors import Result
from k3patches.work import after, opening, starting
from k3patches.work.place import Place, find
from k3patches.work.writing import Options, Writing

FILE = click.Path(path_type=Path)
BASE = click.option(
    "--base", "release", metavar="X.Y.Z", help="vLLM release. [default: that of the open edit, or of VERSION]"
)
CACHE = click.option("--cache", type=FILE, help="Folder of downloads. [default: the user's cache]")
EDIT_EXAMPLES = """
\b
  ci/edit.sh 0004                  the fourth patch, on top of those before it
  ci/edit.sh fused-padding         the patch of this fix
  ci/edit.sh --quilt               the same for quilt: push, edit, quilt refresh
  ci/edit.sh --abort               throw the edit away
"""
REFRESH_EXAMPLES = f"""
\b
  ci/refresh.sh                    write the open edit back
  ci/refresh.sh --amend            fold what is not committed into the last commit first
  ci/refresh.sh --continue         after resolving a conflict

\b
Exit code: {int(Result.REBASED)} written, {int(Result.NOTHING_TO_DO)} nothing changed, \
{int(Result.NEEDS_A_PERSON)} needs a person, {int(Result.BROKEN)} the contracts cannot run,
1 another error, 2 wrong usage.
"""
NEW_EXAMPLES = """
\b
  ci/new.sh lost-scale --subject "[Bugfix][ModelOpt] Keep the scale of a renamed layer"
"""


@click.command("edit", epilog=EDIT_EXAMPLES)
@click.argument("patch", metavar="[NNNN]", required=False)
@BASE
@click.option("--quilt", is_flag=True, help="A pristine tree with the series in patches/, for quilt's own commands.")
@click.option("--abort", is_flag=True, help="Throw the open edit away, with all that is in it.")
@CACHE
def edit_command(patch: str | None, release: str | None, quilt: bool, abort: bool, cache: Path | None) -> None:
    """Open the series at a patch, as an ordinary git tree in build/edit.

    NNNN is a patch's number, or the id of its fix.  The patches up to it are commits on the release's source; the later
    ones are set aside, under the tag 'series', and ci/refresh.sh carries them on top again.
    """
    if bool(patch) + quilt + abort != 1:
        raise click.UsageError("name one patch, or --quilt, or --abort")
    place = _place(release, cache)
    with place.lock():
        if abort:
            _abort(place)
            return
        state = opening.with_quilt(place) if quilt else opening.at_patch(place, str(patch))
    click.echo(place.tree)
    if quilt:
        _say(
            f"vLLM {place.release}'s source, the series in patches/, none applied",
            ("cd there; quilt push -a", "then edit and quilt refresh as ever; no QUILT_PATCHES is needed"),
            (place.command("refresh.sh"), "write all patches back"),
        )
        return
    _say(
        f"vLLM {place.release} at {state.patch}, {len(state.later)} later patches set aside",
        ("git commit -a --amend", "there, to change the patch; an earlier one with git rebase -i pristine"),
        ("git commit -s", "for a patch more, with a Contract trailer"),
        (place.command("refresh.sh"), "write it back"),
    )


@click.command("write-back", epilog=REFRESH_EXAMPLES)
@BASE
@click.option("--amend", is_flag=True, help="Fold uncommitted changes into the last commit first.")
@click.option("--continue", "go_on", is_flag=True, help="Go on after a conflict was resolved.")
@click.option("--abort", is_flag=True, help="Go back to the edit, without what was carried on top.")
@click.option("--no-runs", is_flag=True, help="Run no contracts and tests, only the lint.")
@CACHE
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def write_back_command(
    release: str | None, amend: bool, go_on: bool, abort: bool, no_runs: bool, cache: Path | None, python: str
) -> None:
    """Write the open edit back into the series, and end it.

    The later patches are merged on top, three ways.  Then the lint must be clean, the contracts of all patches that
    changed must hold with the series, those of edited ones fail without their patch, and the edited ones' own tests
    pass.  The series is written whole or not at all; an edit that changes nothing changes no byte.
    """
    if go_on + abort + amend > 1:
        raise click.UsageError("--continue, --abort and --amend exclude each other")
    place = _place(release, cache)
    with place.lock():
        writing = Writing(place, Options(amend, not no_runs, python))
        if abort:
            writing.abort()
            return
        written = writing.run(go_on)
    if not written.changed:
        click.echo("nothing to do: the series is what it was")
        sys.exit(int(Result.NOTHING_TO_DO))
    for name, how in written.changed.items():
        click.echo(f"{place.shown(place.series_dir / name)}: {how}")
    _say("next, and then commit:", *after.next_steps(place.project, place.release, written.fixes))


@click.command("new", epilog=NEW_EXAMPLES)
@click.argument("fix", metavar="FIX-ID")
@click.option("--subject", required=True, help="Of the commit, in vLLM's style.")
@click.option("--test", metavar="PATH", help="The patch's test in vLLM's tree. [default: tests/test_FIX_ID.py]")
@BASE
@CACHE
def new_command(fix: str, subject: str, test: str | None, release: str | None, cache: Path | None) -> None:
    """Start a fix: its patch as an open edit, its contract and its test, each still to be written.

    Nothing of it passes as it is: ci/refresh.sh, which ends the edit, takes it when the message is written, the
    contract fails without the patch and holds with it, and the test passes.
    """
    place = _place(release, cache)
    with place.lock():
        contract, tested = starting.start(place, fix, subject, test)
    click.echo(place.tree)
    _say(
        f"vLLM {place.release} with {fix} begun as the last commit; write",
        (f"{place.shown(contract)}", "the contract: what is promised, against no implementation"),
        (f"{place.shown(place.tree)}", f"the fix, and its test in {tested}"),
        ("git commit -a --amend", "there: what was wrong, what the user saw, what is done"),
        (place.command("refresh.sh"), "write it back"),
    )


def _place(release: str | None, cache: Path | None) -> Place:
    return find(Project.find(), release, cache or fetch.default_cache())


def _abort(place: Place) -> None:
    state = place.state()
    place.close()
    if state.fix and (contract := starting.forget(place, state.fix)):
        click.echo(f"{place.shown(contract)} stays, since somebody wrote it: delete it if it is not wanted", err=True)


def _say(what: str, *steps: tuple[str, str]) -> None:
    click.echo(what, err=True)
    width = max(len(command) for command, _ in steps)
    for command, why in steps:
        click.echo(f"  {command:{width}}  {why}", err=True)
