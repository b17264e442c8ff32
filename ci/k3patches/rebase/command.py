"""The command ``rebase``, behind ci/rebase.sh."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from k3patches import fetch
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.rebase import state
from k3patches.rebase import target as targets
from k3patches.rebase.engine import Options, Rebase
from k3patches.rebase.errors import Result

FILE = click.Path(path_type=Path)
EXAMPLES = f"""
\b
  ci/rebase.sh 0.28.0                     a release
  ci/rebase.sh main --git                 a branch of upstream's repository
  ci/rebase.sh main --git=URL             of another one
  ci/rebase.sh ../vllm                    a folder with vLLM's source
  ci/rebase.sh 0.28.0 --continue          after editing build/rebase/v0.28.0/tree

\b
Exit code: {int(Result.REBASED)} rebased, {int(Result.NOTHING_TO_DO)} nothing to do, \
{int(Result.NEEDS_A_PERSON)} needs a person, {int(Result.BROKEN)} broken,
1 another error, 2 wrong usage.
"""


@click.command("rebase", epilog=EXAMPLES)
@click.argument("target", required=False)
@click.option(
    "--from",
    "base",
    metavar="X.Y.Z",
    help="The base to carry from. [default: the next older, or the one most like it]",
)
@click.option(
    "--git",
    metavar="URL",
    is_flag=False,
    flag_value=targets.UPSTREAM,
    help="TARGET is a branch, tag or commit of this repository. [default: upstream's, for what is no release]",
)
@click.option("--continue", "go_on", is_flag=True, help="Go on after a person's edit in the kept tree.")
@click.option("--abort", is_flag=True, help="Throw the kept tree away.")
@click.option("--record", is_flag=True, help="Record how the committed series differs from an automatic rebase.")
@click.option("--take", type=FILE, metavar="TREE", help="Carry nothing: the series are the commits of this git tree.")
@click.option("--report", type=FILE, help="Write report.md and report.json into this folder as well.")
@click.option("--fresh", is_flag=True, help="Run every contract, also on trees that it ran on before.")
@click.option("--cache", type=FILE, help="Folder of downloads. [default: the user's cache]")
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def rebase_command(
    target: str | None,
    base: str | None,
    git: str | None,
    go_on: bool,
    abort: bool,
    record: bool,
    take: Path | None,
    report: Path | None,
    fresh: bool,
    cache: Path | None,
    python: str,
) -> None:
    """Carry the series to another vLLM: a release, a git ref, or a folder of its source.

    Every contract runs on the pristine target; a fix that holds there needs its patch no more.
    The other patches are merged in order, three ways, and every contract must hold with them.
    Then patches/vX.Y.Z is written, whole or not at all; what is no release has nothing to pin,
    and its series goes to build/rebase/NAME/series.

    At a conflict, or where a patch no longer does its job, the tree is kept for a person to edit
    with ordinary git.  What they did is recorded in patches/resolutions, so that the same rebase
    needs nobody the next time.  --record does that for a series edited since, with
    refresh, and --take for commits that were made without this command.
    """
    if go_on + abort + record + bool(take) > 1:
        raise click.UsageError("--continue, --abort, --record and --take exclude each other")
    project = Project.find()
    wanted = targets.parse(target, git) if target else _kept(project, go_on or abort)
    options = Options(base, cache or fetch.default_cache(), python, report, fresh, record, take)
    rebase = Rebase(project, wanted, options)
    with rebase.lock():
        if abort:
            rebase.abort()
            return
        result = rebase.run(go_on)
    click.echo(f"{wanted.label}: {result}, {rebase.report.where}")
    if not wanted.release:
        click.echo("it is no release, so nothing is pinned and the series stays in the build folder", err=True)
    elif result is Result.REBASED:
        click.echo(f"check it with ./build.sh lint --base {wanted.release}, and commit it", err=True)
    sys.exit(int(result))


def _kept(project: Project, wanted: bool) -> targets.Target:
    """The target of the one rebase that is kept."""
    if not wanted:
        raise click.UsageError("name the target: a release such as 0.28.0, a git ref with --git, or a folder")
    folders = [p.parent for p in (project.root / "build" / "rebase").glob(f"*/{state.FILE}")]
    kept = [found for folder in folders if (found := state.load(folder)) and found.person]
    if len(kept) != 1:
        names = ", ".join(sorted(found.target for found in kept))
        raise UserError(f"several rebases are kept ({names}): name one" if kept else "no rebase is kept: name a target")
    return targets.parse(kept[0].target, kept[0].git)
