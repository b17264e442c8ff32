"""The command line: one command a stage, and build, which runs them in order."""

from __future__ import annotations

import errno
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from k3patches import base as bases
from k3patches import (
    contents,
    contracts,
    fetch,
    lint,
    manifest,
    patchtests,
    provenance,
    refresh,
    sbom,
    series,
    tree,
    verify,
    wheels,
)
from k3patches.base import Base
from k3patches.errors import UserError
from k3patches.git import GitError
from k3patches.pr.command import export_command, import_command
from k3patches.project import Project
from k3patches.rebase.command import rebase_command
from k3patches.rebase.replay import replay_command
from k3patches.series import Patch
from k3patches.source import Folder, GitCommit, Sdist, Source
from k3patches.status import findings
from k3patches.status_cli import table_command
from k3patches.upstream.command import upstream_tests_command
from k3patches.wheels import Official, SourceBuild
from k3patches.work.adopt import adopt
from k3patches.work.command import edit_command, new_command, write_back_command

FILE = click.Path(path_type=Path)
ARCHES = ("x86_64", "aarch64")
EXAMPLES = """
\b
  ./build.sh                          the wheel of the default base, in dist/
  ./build.sh --arch aarch64           the same for Grace, from any machine
  ./build.sh --base 0.27.1            of a certain vLLM release
  ./build.sh fetch                    only download and check what is pinned
  ./build.sh apply --until 0003       a git tree with the first three patches
  ./build.sh status                   which fixes the installed vLLM holds
  ./build.sh COMMAND --help           what a command does and takes
"""


@dataclass(frozen=True)
class Inputs:
    """The options that say what a build is made from."""

    cache: Path
    sdist: Path | None
    wheel: Path | None
    source_dir: Path | None
    git: str | None
    ref: str | None
    arch: str

    def official_wheel(self, base: Base) -> Official:
        pin = base.wheel(self.arch)
        return Official(fetch.given(self.wheel, pin) if self.wheel else fetch.fetch(pin, self.cache), pin)

    def how(self, base: Base, from_source: bool, no_isolation: bool, python: str) -> Official | SourceBuild:
        if from_source and self.wheel:
            raise UserError("--wheel is what the overlay build starts from, and --from-source is without: give one")
        if no_isolation and not from_source:
            raise UserError("--no-isolation says how to build from source: give --from-source as well, or neither")
        return SourceBuild(python, not no_isolation) if from_source else self.official_wheel(base)

    def source(self, project: Project, base: Base) -> Source:
        if sum(map(bool, (self.sdist, self.source_dir, self.git))) > 1:
            raise UserError("--sdist, --source-dir and --git each name the source: give one of them")
        if bool(self.git) != bool(self.ref):
            raise UserError("--git and --ref go together: a repository's URL, and a branch, tag or commit in it")
        if self.source_dir:
            return Folder(self.source_dir)
        if self.git and self.ref:
            return GitCommit.resolve(self.git, self.ref, project.root / "build" / "git")
        path = fetch.given(self.sdist, base.sdist) if self.sdist else fetch.fetch(base.sdist, self.cache)
        return Sdist(path, base.sdist.sha256)


Command = Callable[..., Any]


def _input_options(*, wheel: bool = True) -> Callable[[Command], Command]:
    """The options of :class:`Inputs`, handed to the command as one ``inputs``."""
    options = [
        click.option("--cache", type=FILE, default=None, help="Folder of downloads. [default: the user's cache]"),
        click.option("--sdist", type=FILE, help="The base's sdist, in place of a download."),
        click.option("--source-dir", type=FILE, help="A folder with vLLM's source, in place of the sdist."),
        click.option("--git", metavar="URL", help="A git repository of vLLM, in place of the sdist; needs --ref."),
        click.option("--ref", metavar="REF", help="Branch, tag or commit for --git."),
    ]
    if wheel:
        options += [
            click.option("--wheel", type=FILE, help="The base's official wheel, in place of a download."),
            click.option("--arch", type=click.Choice(ARCHES), default=None, help="Of the wheel. [default: this one's]"),
        ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(
            *args: Any,
            cache: Path | None,
            sdist: Path | None,
            source_dir: Path | None,
            git: str | None,
            ref: str | None,
            wheel: Path | None = None,
            arch: str | None = None,
            **kwargs: Any,
        ) -> Any:
            inputs = Inputs(
                cache=cache or fetch.default_cache(),
                sdist=sdist,
                wheel=wheel,
                source_dir=source_dir,
                git=git,
                ref=ref,
                arch=arch or _this_arch(),
            )
            return command(*args, inputs=inputs, **kwargs)

        for option in reversed(options):
            wrapper = option(wrapper)
        return wrapper

    return decorate


BASE_OPTION = click.option("--base", "release", metavar="X.Y.Z", help="vLLM release. [default: that of VERSION]")
UNTIL_OPTION = click.option("--until", metavar="NNNN", help="The last patch to apply.")
SKIP_OPTION = click.option("--skip", metavar="NNNN", multiple=True, help="A patch to leave out; may be repeated.")
OUT_OPTION = click.option("--out", type=FILE, default=None, help="Folder for the wheel. [default: dist/]")


def _source_build_options(command: Command) -> Command:
    for option in (
        click.option("--python", default=sys.executable, help="Interpreter that builds from source."),
        click.option("--no-isolation", is_flag=True, help="Build with what --python has installed, torch included."),
        click.option("--from-source", is_flag=True, help="Use vLLM's setup.py, not the overlay on the official wheel."),
    ):
        command = option(command)
    return command


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        project = Project.find()
        click.echo(f"{project.default_release}+k3.{project.revision}")
        ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXAMPLES)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Build vLLM wheels that carry the Kimi-K3 patch series.

    build runs the stages fetch, apply, wheel and verify in order; each also runs alone,
    and running one again changes nothing.  vLLM itself comes from the package index that
    pip is configured for, checked against the sha256 in patches/vX.Y.Z/base.toml.
    """


@cli.command("build", epilog=EXAMPLES)
@BASE_OPTION
@_input_options()
@UNTIL_OPTION
@SKIP_OPTION
@OUT_OPTION
@_source_build_options
def build_command(
    release: str | None,
    inputs: Inputs,
    until: str | None,
    skip: Sequence[str],
    out: Path | None,
    from_source: bool,
    no_isolation: bool,
    python: str,
) -> None:
    """Build the patched wheel of one base: fetch, apply, wheel, verify.

    The default lays the patched files over the official wheel, which takes seconds and keeps
    every compiled byte; --from-source compiles the patched tree with vLLM's own setup.py, whose
    environment variables (VLLM_TARGET_DEVICE, VLLM_USE_PRECOMPILED, MAX_JOBS ..) pass through.
    """
    project, base, patches = _open(release)
    with project.lock():
        source = inputs.source(project, base)
        how = inputs.how(base, from_source, no_isolation, python)
        _apply(project, base, source, series.select(patches, until, skip))
        _wheel(project, base, patches, how, out)


@cli.command("fetch")
@BASE_OPTION
@_input_options()
def fetch_command(release: str | None, inputs: Inputs) -> None:
    """Download the base's sdist and official wheel into the cache, and check them."""
    project, base, _ = _open(release)
    with project.lock():
        source = inputs.source(project, base)
    click.echo(source.path if isinstance(source, Sdist) else source.identity)
    click.echo(inputs.official_wheel(base).path)


@cli.command("apply")
@BASE_OPTION
@_input_options(wheel=False)
@UNTIL_OPTION
@SKIP_OPTION
def apply_command(release: str | None, inputs: Inputs, until: str | None, skip: Sequence[str]) -> None:
    """Make build/vX.Y.Z/patched: a git tree, one commit a patch on the pristine source.

    Patches must fit exactly, without fuzz or offset.
    """
    project, base, patches = _open(release)
    with project.lock():
        _apply(project, base, inputs.source(project, base), series.select(patches, until, skip))
    click.echo(project.patched_tree(base.release))


@cli.command("wheel")
@BASE_OPTION
@_input_options()
@OUT_OPTION
@_source_build_options
def wheel_command(
    release: str | None, inputs: Inputs, out: Path | None, from_source: bool, no_isolation: bool, python: str
) -> None:
    """Make the wheel of the tree that apply left, verify it and put it into dist/."""
    project, base, patches = _open(release)
    with project.lock():
        how = inputs.how(base, from_source, no_isolation, python)
        _wheel(project, base, patches, how, out)


@cli.command("verify")
@BASE_OPTION
@_input_options()
@click.argument("built", type=FILE, required=False, metavar="[WHEEL]")
def verify_command(release: str | None, inputs: Inputs, built: Path | None) -> None:
    """Check a built wheel against the official one and the patched tree.

    RECORD, tags, version, patched files, untouched files, that all Python compiles.
    Default: the wheel in dist/.
    """
    project, base, patches = _open(release)
    patched = project.patched_tree(base.release)
    chosen = wheels.applied(patched, patches)
    if built is None:
        version = manifest.version(base, project.revision, chosen, whole=len(chosen) == len(patches))
        built = project.dist_dir / manifest.wheel_name(base.wheel(inputs.arch).filename, base, version)
    if not built.is_file():
        raise UserError(f"{built} is not there: build it first, or name a wheel")
    overlaid = verify.manifest_of(built).build == "overlay"
    click.echo(f"verifying {built.name}", err=True)
    arch = next((a for a in ARCHES if built.name.endswith(f"_{a}.whl")), inputs.arch)
    verify.verify(built, patched, replace(inputs, arch=arch).official_wheel(base).path if overlaid else None)


@cli.command("status")
@click.option("--python", help="Interpreter of the environment to look into. [default: this one's, then PATH's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("wheel", type=FILE, required=False)
def status_command(wheel: Path | None, python: str | None, as_json: bool) -> None:
    """Say which fixes an installed vLLM, or a WHEEL file, holds, and whether its files are whole.

    \b
    Exit code: 0 patched and whole, 3 stock vLLM, 4 files changed or missing, 5 no vLLM.
    """
    if wheel and python:
        raise UserError("a wheel file and --python are two places to look: give one of them")
    status = contents.of_wheel(wheel) if wheel else contents.of_environment(python)
    if as_json:
        click.echo(status.to_json())
    else:
        # Into a file or a pipe, names of patches go whole.
        contents.show(status, Console(markup=False, width=None if sys.stdout.isatty() else 160))
    sys.exit(status.verdict)


@cli.command("sbom")
@click.argument("wheel", type=FILE)
def sbom_command(wheel: Path) -> None:
    """Print the bill of materials that WHEEL carries, as CycloneDX JSON.

    An installed vLLM has it too, in its dist-info folder below sboms/.
    """
    click.echo(verify.member(wheel, sbom.FILE).decode(), nl=False)


@cli.command("lint")
@BASE_OPTION
@click.option("--all", "every", is_flag=True, help="Every base that has a series, some side by side.")
@_input_options(wheel=False)
def lint_command(release: str | None, every: bool, inputs: Inputs) -> None:
    """Check a series: form, mails, scope, and that it applies with git am, patch and quilt."""
    if every and (release or inputs.sdist or inputs.source_dir or inputs.git):
        raise UserError("--all is for every base as it is pinned: leave --base and other sources out")
    project = Project.find()
    lines: dict[str, list[str]] = {r: [] for r in (project.releases if every else [release or project.default_release])}

    def check(release: str) -> bool:
        _, base, patches = _open(release)
        echo = lines[release].append
        echo(f"series of vLLM {release}, {len(patches)} patches")
        return lint.lint(base, inputs.source(project, base), patches, _contracts(project), project.root / "build", echo)

    with project.lock(), ThreadPoolExecutor(contracts.PARALLEL) as pool:
        clean = []
        for release, checked in [(release, pool.submit(check, release)) for release in lines]:
            try:
                clean.append(checked.result())
            finally:
                for line in lines[release]:
                    click.echo(line, err=True)
    if not all(clean):
        raise UserError("the series has the findings listed above: mend them and run lint again")


@cli.command("refresh")
@BASE_OPTION
@click.argument("git_tree", type=FILE, metavar="TREE")
def refresh_command(release: str | None, git_tree: Path) -> None:
    """Write the series from the commits of TREE, one patch a commit.

    TREE is a git tree such as apply makes: a tag 'pristine' on the release's source, and the
    patches as commits on it, edited with ordinary git.  Writing the same commits again
    changes no byte.
    """
    project = Project.find()
    with project.lock():
        names = refresh.refresh(git_tree, project.series_dir(release or project.default_release))
    for name in names:
        click.echo(name)


@cli.command("contracts")
@BASE_OPTION
@_input_options(wheel=False)
@click.option("--fix", "chosen", multiple=True, metavar="ID", help="Only this fix; may be repeated.")
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def contracts_command(release: str | None, inputs: Inputs, chosen: Sequence[str], python: str, as_json: bool) -> None:
    """Run the contracts on the pristine and the patched tree, side by side.

    \b
    native   holds on the pristine tree
    patched  fails there, holds with the series
    absent   the feature does not exist on this release
    broken   does not hold with the series: an error

    A contract that holds without the patch that names it is an error as well.
    """
    project, base, patches = _open(release)
    folder = _contracts(project)
    chosen = chosen or contracts.fixes(folder)
    with project.lock():
        source = inputs.source(project, base)
        pristine = project.pristine_tree(base.release)
        tree.apply(base, source, [], pristine)
        _apply(project, base, source, patches)
        verdicts = contracts.compare(folder, chosen, pristine, project.patched_tree(base.release), python)
        if as_json:
            click.echo(contracts.to_json(verdicts))
        else:
            contracts.show(verdicts, Console(markup=False))
    wrong = findings(verdicts, base, patches)
    if wrong:
        raise UserError(f"vLLM {base.release}: {'; '.join(wrong)}; run pytest tests/contracts on that tree for details")


@cli.command("patch-tests")
@BASE_OPTION
@click.option("--python", default=sys.executable, help="Interpreter that has torch and vLLM's requirements.")
def patch_tests_command(release: str | None, python: str) -> None:
    """Run the tests that the patches carry, in the patched tree."""
    project, base, patches = _open(release)
    patched = project.patched_tree(base.release)
    wheels.applied(patched, patches)
    if not patchtests.run(patches, patched, python):
        raise UserError(f"tests that the patches for vLLM {base.release} carry fail in {patched}, see above")


cli.add_command(edit_command)
cli.add_command(export_command)
cli.add_command(import_command)
cli.add_command(new_command)
cli.add_command(rebase_command)
cli.add_command(replay_command)
cli.add_command(table_command)
cli.add_command(upstream_tests_command)
cli.add_command(write_back_command)


def _open(release: str | None) -> tuple[Project, Base, list[Patch]]:
    project = Project.find()
    folder = project.series_dir(release or project.default_release)
    return project, bases.load(folder), series.load(folder)


def _contracts(project: Project) -> Path:
    return project.root / "tests" / "contracts"


def _apply(project: Project, base: Base, source: Source, patches: Sequence[Patch]) -> None:
    patched = project.patched_tree(base.release)
    adopt(patched, series.load(project.series_dir(base.release)))
    tree.apply(base, source, patches, patched)
    click.echo(f"vLLM {base.release} with {len(patches)} patches in {patched}", err=True)


def _wheel(
    project: Project, base: Base, patches: Sequence[Patch], how: Official | SourceBuild, out: Path | None
) -> None:
    patched, stage = project.patched_tree(base.release), project.build_dir(base.release) / "wheel"
    origin = provenance.here(project.root, base.epoch)
    click.echo(wheels.make(base, project.revision, patches, patched, how, stage, out or project.dist_dir, origin))


def _this_arch() -> str:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return machine if machine in ARCHES else "x86_64"


def main() -> None:
    """Run the command line; what the machine refuses is an error of one sentence as well."""
    try:
        cli(prog_name="k3-patches")
    except (OSError, GitError) as e:
        where = getattr(e, "filename", None) or "the build folder, the cache or the output folder"
        reason = e.brief if isinstance(e, GitError) else e.strerror or str(e)
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(e):
            message = f"no space left for {where}: free some (a build needs about 2 GiB) and run it again"
        else:
            message = f"{where}: {reason}"
        click.echo(f"Error: {message}", err=True)
        sys.exit(1)
