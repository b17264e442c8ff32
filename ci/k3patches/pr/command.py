"""The commands ``export-pr`` and ``import-pr``, behind ci/export-pr.sh and ci/import-pr.sh."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from k3patches import fetch
from k3patches.errors import UserError
from k3patches.pr import check, known, many, order, stack
from k3patches.pr.desk import Desk, Options
from k3patches.pr.export import Export
from k3patches.pr.imports import Import, locate
from k3patches.pr.many import NOT_RUN, tell
from k3patches.project import Project
from k3patches.rebase.errors import Result

FILE = click.Path(path_type=Path)
CODES = f"""
\b
Exit code: {int(Result.REBASED)} done, {int(Result.NEEDS_A_PERSON)} needs a person, {int(Result.BROKEN)} the contracts \
cannot run there,
{NOT_RUN} done, but nothing was run, 1 another error, 2 wrong usage.
"""
EXPORT_EXAMPLES = f"""
\b
  ci/export-pr.sh 0001                            a branch on the release, in build/pr/v0.27.1/0001-...
  ci/export-pr.sh 0001 --onto ../vllm main        the branch k3/FIX in that clone, which stays where it is
  ci/export-pr.sh 0005 --stack                    on top of what it depends on
  ci/export-pr.sh 0004 --with 0002                on top of another one that it does not declare
  ci/export-pr.sh 0008 --continue                 after editing build/pr/work/v0.27.1/0008-.../tree
  ci/export-pr.sh --all --check --base 0.33.0     try them all, there and back, and leave nothing
{CODES}"""
IMPORT_EXAMPLES = f"""
\b
  ci/import-pr.sh 0001                            from build/pr/v0.27.1/0001-.../tree
  ci/import-pr.sh 0001 --from ../vllm             from the branch k3/FIX of that clone
  ci/import-pr.sh 0001 --from ../vllm --branch B --since COMMIT
                                                  from one that was rebased, or exported elsewhere

\b
Exit code: {int(Result.REBASED)} imported, {int(Result.NOTHING_TO_DO)} nothing to do, {int(Result.NEEDS_A_PERSON)} \
needs a person, 1 another error, 2 wrong usage.
"""
BASE = click.option("--base", "release", metavar="X.Y.Z", help="vLLM release. [default: that of VERSION]")
CACHE = click.option("--cache", type=FILE, help="Folder of downloads. [default: the user's cache]")
CONTINUE = click.option("--continue", "go_on", is_flag=True, help="Go on after a person's edit in the kept tree.")
ABORT = click.option("--abort", is_flag=True, help="Throw the kept tree away.")


@click.command("export-pr", epilog=EXPORT_EXAMPLES)
@click.argument("patch", metavar="NNNN", required=False)
@click.option(
    "--all", "every", is_flag=True, help="All that upstream is still to get, in its best order; implies --stack."
)
@BASE
@click.option("--onto", type=(FILE, str), metavar="GITDIR REF", help="A commit of this clone. [default: the release]")
@click.option("--branch", help="The branch's name. [default: k3/FIX]")
@click.option("--stack", "stacked", is_flag=True, help="Put it on top of the patches that it depends on.")
@click.option("--with", "also", metavar="NNNN", multiple=True, help="Another patch to put below; may be repeated.")
@click.option("--check", "trial", is_flag=True, help="With --all: also import each again, and leave nothing.")
@click.option("--no-runs", is_flag=True, help="Run neither tests nor contracts; the description says so.")
@click.option("--json", "json_file", type=FILE, help="With --all: write the table to this file as well.")
@CONTINUE
@ABORT
@CACHE
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def export_command(
    patch: str | None,
    every: bool,
    release: str | None,
    onto: tuple[Path, str] | None,
    branch: str | None,
    stacked: bool,
    also: tuple[str, ...],
    trial: bool,
    no_runs: bool,
    json_file: Path | None,
    go_on: bool,
    abort: bool,
    cache: Path | None,
    python: str,
) -> None:
    """Make a patch a branch on upstream's tree, and write the text of its pull request.

    NNNN is a patch's number, or the id of its fix.  The patch is merged onto the tree, three ways;
    what only this project reads is taken out of it.  Its contracts, its own tests and upstream's
    formatting are run on the branch, with and without the patch, and the description in upstream's
    template tells what came out.  Branch and description appear whole, or not at all.
    """
    if every == bool(patch):
        raise click.UsageError("name one patch, or --all")
    if go_on + abort + every > 1:
        raise click.UsageError("--continue and --abort go on with one patch, and exclude each other")
    if every and (branch or also):
        raise click.UsageError("--branch and --with are of one branch, and --all makes several")
    if (trial or json_file) and not every:
        raise click.UsageError("--check and --json go with --all")
    project = Project.find()
    options = Options(
        cache or fetch.default_cache(), python, onto, branch, stacked or every or bool(also), also, not no_runs
    )
    desk = Desk(project, release or project.default_release, options, trial=trial)
    with desk.lock():
        if every:
            pending = order.pending(desk.patches, known.load(desk.shared))
            rows = many.export_all(desk, pending, check.there_and_back if trial else None)
            many.show(desk, rows)
            if json_file:
                many.write(json_file, desk, rows)
            sys.exit(max((row.code for row in rows), default=0))
        export = Export(desk, stack.find(desk.patches, str(patch)))
        if abort:
            export.abort()
            return
        done = export.run(go_on)
    tell(desk, done)
    sys.exit(NOT_RUN if done.results.without else 0)


@click.command("import-pr", epilog=IMPORT_EXAMPLES)
@click.argument("patch", metavar="NNNN")
@BASE
@click.option("--from", "gitdir", type=FILE, metavar="GITDIR", help="The clone. [default: the tree in build/pr]")
@click.option("--branch", help="The branch in it. [default: the exported one, k3/FIX]")
@click.option(
    "--since", metavar="COMMIT", help="The commit below the branch's first one, if it is another than exported."
)
@CONTINUE
@ABORT
@CACHE
def import_command(
    patch: str,
    release: str | None,
    gitdir: Path | None,
    branch: str | None,
    since: str | None,
    go_on: bool,
    abort: bool,
    cache: Path | None,
) -> None:
    """Make an exported branch the patch again: what was amended, and what a review added, in one.

    Only the edit goes into the patch; this project's trailers come back.  The patches after it are
    carried on top, and the series changes as a whole, or not at all.
    """
    if go_on and abort:
        raise click.UsageError("--continue and --abort exclude each other")
    project = Project.find()
    desk = Desk(project, release or project.default_release, Options(cache or fetch.default_cache(), sys.executable))
    if gitdir and not gitdir.is_dir():
        raise UserError(f"{gitdir} is no folder: name the clone that has the branch")
    with desk.lock():
        found = stack.find(desk.patches, patch)
        importing = Import(desk, found)
        if abort:
            importing.abort()
            return
        imported = importing.go_on() if go_on else importing.start(locate(desk, found, gitdir, branch, since))
        importing.write(imported)
    if not imported.changed:
        click.echo(f"{found.name}: nothing to do, the branch is what the patch is")
        sys.exit(int(Result.NOTHING_TO_DO))
    folder = desk.shown(desk.folder)
    for name, how in imported.changed.items():
        click.echo(f"{folder / name}: {how}")
    click.echo(f"check it with ./build.sh lint --base {desk.release} and ci/status.sh --base {desk.release}", err=True)
    if (project.root / "patches" / "resolutions" / f"v{desk.release}").is_dir():
        click.echo(f"and note what a rebase cannot know with ci/rebase.sh {desk.release} --record", err=True)
