"""The command ``upstream-tests``, behind ci/upstream-tests.sh."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from k3patches import base as bases
from k3patches import fetch, files, series, tree
from k3patches.base import Base
from k3patches.contracts import MALLOC
from k3patches.errors import UserError
from k3patches.git import git
from k3patches.project import Project
from k3patches.series import Patch
from k3patches.source import Sdist
from k3patches.status import Origin
from k3patches.upstream import results, select, sides
from k3patches.upstream.results import Entry
from k3patches.upstream.sides import Comparison, Limits, Runner, Side

FILE_TYPE = click.Path(path_type=Path)
PLUGINS = ("k3patches.cpu_plugin",)
# Files a process, which takes ten seconds and more before the first test.
CHUNK = 12
STEP_S, FILE_S = 240, 20
# More than that, and one test of a size that is made for a GPU takes the machine's memory.
MEMORY_GIB = 4
EXAMPLES = """
\b
  ci/upstream-tests.sh                  all bases, into patches/upstream-tests.json
  ci/upstream-tests.sh --base 0.33.0    only this one, the others' results stay
  ci/upstream-tests.sh --current        run nothing: are the results of today's series, and did nothing turn?
  ci/upstream-tests.sh --list --base X  run nothing: print the test files that would be run
"""


@click.command("upstream-tests", epilog=EXAMPLES)
@click.option("--base", "chosen", multiple=True, metavar="X.Y.Z", help="Only this base; may be repeated.")
@click.option("--list", "listed", is_flag=True, help="Run nothing: print the test files that would be run.")
@click.option("--current", is_flag=True, help="Run nothing: fail where the results are old, or a test turned.")
@click.option("--json", "json_file", type=FILE_TYPE, help=f"Another file than patches/{results.FILE}.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes at a time.")
@click.option("--cache", type=FILE_TYPE, help="Folder of downloads. [default: the user's cache]")
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def upstream_tests_command(
    chosen: Sequence[str],
    listed: bool,
    current: bool,
    json_file: Path | None,
    jobs: int,
    cache: Path | None,
    python: str,
) -> None:
    """Run upstream's own tests of what the series changes, and find those that it turns from passed to failed.

    These are the test files of the release that import or name a changed module; what patches add is run elsewhere.
    They run on the pristine tree, without a GPU and a network, and what passes there on the patched one.  A test
    that seems to have turned is run once more on both.  Exit code 1: at least one did.
    """
    if listed and current:
        raise UserError("--list and --current are two things to do: give one of them")
    project = Project.find()
    for release in chosen:
        project.series_dir(release)
    releases = [r for r in project.releases if not chosen or r in chosen]
    path = json_file or project.root / "patches" / results.FILE
    if current:
        results.require(project, releases)
        return
    turned = []
    with project.lock():
        for release in releases:
            where = project.series_dir(release)
            base, patches = bases.load(where), series.load(where)
            _trees(project, base, patches, cache)
            changed = _changed(project.patched_tree(release))
            chosen_tests = _files(project, release, changed)
            if listed:
                click.echo("\n".join(chosen_tests))
                continue
            click.echo(f"vLLM {release}: {len(chosen_tests)} test files of upstream's", err=True)
            comparison = _run(project, release, chosen_tests, changed, jobs, python)
            _show(release, comparison)
            entries = results.read(path) if path.is_file() else {}
            entries[release] = Entry.of(Origin.of_series(base, patches), chosen_tests, comparison)
            files.write(path, results.to_json(entries, project.releases))
            turned += [f"{release}: {t.test}" for t in comparison.turned]
    if turned:
        raise UserError(f"{len(turned)} of upstream's tests pass on the release and not with the series: {turned[0]}")


def _trees(project: Project, base: Base, patches: Sequence[Patch], cache: Path | None) -> None:
    source = Sdist(fetch.fetch(base.sdist, cache or fetch.default_cache()), base.sdist.sha256)
    for where, chosen in ((project.pristine_tree(base.release), []), (project.patched_tree(base.release), patches)):
        where.parent.mkdir(parents=True, exist_ok=True)
        tree.apply(base, source, chosen, where)


def _changed(patched: Path) -> dict[str, str]:
    """git's letter for what the series does to each file: A where it adds it."""
    status = git("diff", "--name-status", "--no-renames", "-z", tree.PRISTINE_TAG, "HEAD", cwd=patched).split("\0")
    return dict(zip(status[1::2], status[::2], strict=False))


def _files(project: Project, release: str, changed: dict[str, str]) -> list[str]:
    trees = project.pristine_tree(release), project.patched_tree(release)
    names = {name for where in trees for name in select.tests(where, changed)}
    # What patches add is run as the patches' own tests, and nobody has it to lose.
    return sorted(name for name in names if changed.get(name) != "A")


def _run(
    project: Project, release: str, files: Sequence[str], changed: dict[str, str], jobs: int, python: str
) -> Comparison:
    work = project.build_dir(release) / "upstream-tests"
    shutil.rmtree(work, ignore_errors=True)
    # By its version, upstream knows a build for CPUs: its tests ask whether a GPU is to be expected.
    info = work / "cpu" / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    pristine, patched = (
        Side(name, where.resolve(), python, [info.parent])
        for name, where in (("pristine", project.pristine_tree(release)), ("patched", project.patched_tree(release)))
    )
    limits = Limits(STEP_S, FILE_S, memory=MEMORY_GIB)
    # Threads that wait for each other only take CPU time from the other process.
    env = {**MALLOC, "OMP_NUM_THREADS": "1"}
    runner = Runner(work, limits, jobs, CHUNK, PLUGINS, env, lambda line: click.echo(line, err=True))
    return sides.compare(runner, pristine, patched, files, changed)


def _show(release: str, comparison: Comparison) -> None:
    for line in sides.summary(f"vLLM {release}", comparison):
        click.echo(line)
