"""The commands of ci/nightly.sh: what the nightly workflow does, step by step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from k3patches import index, nightly_text
from k3patches.errors import UserError
from k3patches.git import GitError
from k3patches.nightly_find import UPSTREAM, Target, branch, find
from k3patches.nightly_host import Host
from k3patches.nightly_publish import Publisher
from k3patches.nightly_run import Outcome, Result, load, run
from k3patches.project import Project
from k3patches.releases import FINAL

MINUTE_S = 60
GIT_OPTION = click.option(
    "--git", "upstream", default=UPSTREAM, metavar="URL", help="vLLM's repository.", show_default=True
)
OUT_OPTION = click.option(
    "--out", type=click.Path(path_type=Path), help="Where the outcomes lie. [default: build/nightly]"
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Meet new releases of vLLM, and its main, with the series."""


@cli.command("find")
@GIT_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def find_command(upstream: str, as_json: bool) -> None:
    """Print what there is to do: the releases on the package index that have no series, and vLLM's main."""
    targets = find(Project.find(), index.pip_config(), upstream)
    if as_json:
        click.echo(json.dumps([asdict(target) for target in targets], indent=2))
    else:
        for target in targets:
            click.echo(" ".join(filter(None, (target.name, target.commit))))


@cli.command("rebase")
@GIT_OPTION
@OUT_OPTION
@click.option("--limit", type=click.IntRange(min=1), default=60, show_default=True, help="Minutes for one target.")
@click.option("--python", help="Interpreter that has torch and vLLM's requirements. [default: ci/test.sh's]")
@click.argument("names", nargs=-1, metavar="[TARGET]...")
def rebase_command(upstream: str, out: Path | None, limit: int, python: str | None, names: Sequence[str]) -> None:
    """Run the engine for all that find prints, or for the TARGETs: releases, or main.

    Each target's report, and the series and its status where it is a release, lie in a folder of its name
    afterwards.  That a person is needed is a result and no failure; exit code 1 says that the engine itself, or
    ci/status.sh or ci/upstream-tests.sh after it, failed.
    """
    project = Project.find()
    out = out or project.root / "build" / "nightly"
    targets = [_target(project, name, upstream) for name in names] or find(project, index.pip_config(), upstream)
    options = ["--python", python] if python else []
    outcomes = []
    for target in targets:
        click.echo(f"{target.label}: ci/rebase.sh {' '.join(target.arguments)}", err=True)
        outcomes.append(run(project, target, out.resolve(), options, limit * MINUTE_S))
        click.echo(f"{target.label}: {outcomes[-1].result.words}", err=True)
    click.echo(nightly_text.table(outcomes), nl=False)
    _summarize(outcomes)
    failed = [o.target.label for o in outcomes if o.result is Result.ERROR]
    if failed:
        raise UserError(f"the engine or its measuring failed for {', '.join(failed)}: see the messages above")


@cli.command("publish")
@OUT_OPTION
@click.option("--dry-run", is_flag=True, help="Only say what would be opened, updated, pushed and closed.")
def publish_command(out: Path | None, dry_run: bool) -> None:
    """Open, update and close pull requests and issues for what rebase left, by means of gh.

    The pull request of a release comes from the branch k3-rebase/vX.Y.Z; the issues carry the label k3-rebase.
    """
    project = Project.find()
    out = out or project.root / "build" / "nightly"
    outcomes = load(out)
    if not outcomes:
        raise UserError(f"{out} holds no outcomes: run ci/nightly.sh rebase first, or name its folder with --out")
    publisher = Publisher(project, Host(project.root, dry_run))
    failed = []
    for outcome in outcomes:
        try:
            publisher.publish(outcome)
        except (UserError, GitError) as e:
            # The other targets' news must not wait for this one's trouble.
            failed.append(outcome.target.label)
            click.echo(f"{outcome.target.label}: {e.message if isinstance(e, UserError) else e.brief}", err=True)
    publisher.settle_known()
    if failed:
        raise UserError(f"not everything of {', '.join(failed)} could be published: see the reasons above")


def _target(project: Project, name: str, upstream: str) -> Target:
    if FINAL.fullmatch(name):
        return Target(name)
    if name == "main":
        return branch(upstream, project.root)
    raise UserError(f"{name} is no target: name a release such as 0.34.0, or main")


def _summarize(outcomes: Sequence[Outcome]) -> None:
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a", encoding="utf-8") as f:
            f.write(nightly_text.summary(outcomes))


def main() -> None:
    """Run the command line; what the machine refuses is an error of one sentence as well."""
    try:
        cli(prog_name="nightly.sh")
    except (OSError, GitError) as e:
        reason = e.brief if isinstance(e, GitError) else f"{e.filename or 'the build folder'}: {e.strerror or e}"
        click.echo(f"Error: {reason}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
