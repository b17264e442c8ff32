"""The commands of ci/release.sh: check that a revision can be published, build all that it consists of, publish it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from k3patches import base as bases
from k3patches import changelog, fetch, lint, provenance, sbom, series, status, tracking, tree, verify, wheels
from k3patches.changelog import Entry
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.manifest import version, wheel_name
from k3patches.project import Project
from k3patches.ship_host import Releases
from k3patches.source import Sdist
from k3patches.upstream import results
from k3patches.wheels import Official

SUMS = "SHA256SUMS"
BASE_OPTION = click.option("--base", "chosen", multiple=True, metavar="X.Y.Z", help="Only this base; may be repeated.")
CACHE_OPTION = click.option("--cache", type=click.Path(path_type=Path), help="Folder of downloads.")


@dataclass(frozen=True)
class Shipment:
    """A revision of the series, with the wheels of ``releases``."""

    project: Project
    releases: Sequence[str]

    @classmethod
    def of(cls, project: Project, chosen: Sequence[str]) -> Shipment:
        for release in chosen:
            project.series_dir(release)
        return cls(project, [r for r in project.releases if not chosen or r in chosen])

    @property
    def tag(self) -> str:
        return f"v{self.project.default_release}+k3.{self.project.revision}"

    @property
    def folder(self) -> Path:
        return self.project.root / "build" / "release" / self.tag

    def wheels(self) -> dict[Path, tuple[bases.Base, str]]:
        """Where each wheel lies, or will, with its base and architecture."""
        found = {}
        for release in self.releases:
            base = bases.load(self.project.series_dir(release))
            patches = series.load(self.project.series_dir(release))
            named = version(base, self.project.revision, patches, whole=True)
            for arch, pin in base.wheels.items():
                found[self.folder / wheel_name(pin.filename, base, named)] = base, arch
        return found

    def files(self) -> list[Path]:
        """All that is published."""
        made = [p for w in self.wheels() for p in (w, wheels.requirements(w), _bill(w))]
        return [*made, self.folder / SUMS]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Publish a revision of the series: the tag vX.Y.Z+k3.N, and the wheels of all bases and architectures.

    \b
    ci/release.sh check              may it be published?  changes nothing
    ci/release.sh build              that, and make what is published, in build/release
    ci/release.sh publish            say what would be tagged and uploaded
    ci/release.sh publish --yes      do it, with git and gh
    """


@cli.command("check")
@BASE_OPTION
@CACHE_OPTION
def check_command(chosen: Sequence[str], cache: Path | None) -> None:
    """Clean tree, status table and upstream's tests of today and nothing broken, changelog, tag, each series' lint."""
    shipment = Shipment.of(Project.find(), chosen)
    with shipment.project.lock():
        _check(shipment)
        _lint(shipment, cache or fetch.default_cache())


@cli.command("build")
@BASE_OPTION
@CACHE_OPTION
def build_command(chosen: Sequence[str], cache: Path | None) -> None:
    """Check, then build and verify each wheel, and write its bill of materials and all checksums beside it.

    A wheel that lies there already, built from the same commit, is verified and kept.
    """
    shipment = Shipment.of(Project.find(), chosen)
    cache = cache or fetch.default_cache()
    with shipment.project.lock():
        _check(shipment)
        _lint(shipment, cache)
        for wheel, (base, arch) in shipment.wheels().items():
            _build(shipment, wheel, base, arch, cache)
            bill = verify.member(wheel, sbom.FILE)
            _bill(wheel).write_bytes(bill)
        sums = [f"{fetch.sha256(p)}  {p.name}\n" for p in sorted(shipment.files()) if p.name != SUMS]
        (shipment.folder / SUMS).write_text("".join(sums))
    click.echo(shipment.folder)


@cli.command("publish")
@BASE_OPTION
@click.option("--yes", is_flag=True, help="Tag and upload; without it, only say what would be done.")
def publish_command(chosen: Sequence[str], yes: bool) -> None:
    """Tag this commit, and attach what build made to a release of that name.

    A release that a broken upload left behind is completed; one that is published is not touched.
    """
    shipment = Shipment.of(Project.find(), chosen)
    entry = _check(shipment)
    _require_built(shipment)
    host = Releases(shipment.project.root, dry=not yes)
    host.tag(shipment.tag, f"Series {entry.name} for vLLM {', '.join(shipment.releases)}\n\n{entry.text}\n")
    host.publish(shipment.tag, shipment.tag.removeprefix("v"), entry.text, shipment.files())


def _check(shipment: Shipment) -> Entry:
    """What can be told at once; the changelog's entry."""
    project = shipment.project
    try:
        changed = git("status", "--porcelain", cwd=project.root).splitlines()
    except GitError as e:
        raise UserError(f"{project.root} is no git checkout ({e.brief}): a release is of a commit") from None
    if changed:
        raise UserError(f"the checkout has changes ({changed[0].strip()}): commit them, or remove them")
    folder = project.root / "tests" / "contracts"
    table = status.read(project.root / "patches" / status.FILE)
    if old := status.stale(table, project, folder):
        raise UserError(f"the status table is not of today: {'; '.join(old)}; {status.AGAIN} and commit what it writes")
    tracking.require_current(project, table)
    results.require(project, shipment.releases)
    for release in shipment.releases:
        where = project.series_dir(release)
        if found := status.findings(table.columns[release].verdicts, bases.load(where), series.load(where)):
            raise UserError(f"vLLM {release}: {'; '.join(found)}: mend that first")
    patched = [fix for fix in table.fixes if any(fix in c.patches for c in table.columns.values())]
    path = project.root / "patches" / changelog.FILE
    entry = changelog.released(path, project.revision, shipment.releases, patched)
    Releases(project.root).require_tag_free(shipment.tag)
    click.echo(f"{shipment.tag}: commit, status table and changelog are as they should be", err=True)
    return entry


def _lint(shipment: Shipment, cache: Path) -> None:
    project = shipment.project
    for release in shipment.releases:
        where = project.series_dir(release)
        base, patches = bases.load(where), series.load(where)
        click.echo(f"series of vLLM {release}, {len(patches)} patches", err=True)
        source = Sdist(fetch.fetch(base.sdist, cache), base.sdist.sha256)
        if not lint.lint(base, source, patches, project.root / "tests" / "contracts", project.root / "build"):
            raise UserError(f"the series of vLLM {release} has the findings listed above: mend them")


def _build(shipment: Shipment, wheel: Path, base: bases.Base, arch: str, cache: Path) -> None:
    project = shipment.project
    patches = series.load(project.series_dir(base.release))
    patched = project.patched_tree(base.release)
    tree.apply(base, Sdist(fetch.fetch(base.sdist, cache), base.sdist.sha256), patches, patched)
    official = Official(fetch.fetch(base.wheel(arch), cache), base.wheel(arch))
    origin = provenance.here(project.root, base.epoch)
    if _hash_told(wheel) and verify.manifest_of(wheel).provenance == origin:
        click.echo(f"verifying {wheel.name}, which is there", err=True)
        verify.verify(wheel, patched, official.path)
        return
    stage = project.build_dir(base.release) / "wheel"
    wheels.make(base, project.revision, patches, patched, official, stage, wheel.parent, origin)


def _hash_told(wheel: Path) -> bool:
    """Whether the wheel is there with its hash beside it, and that is its hash."""
    told = wheels.requirements(wheel)
    return wheel.is_file() and told.is_file() and f"sha256:{fetch.sha256(wheel)}\n" in told.read_text()


def _require_built(shipment: Shipment) -> None:
    """See that what build made is all there, whole, and of this commit."""
    again = "run ci/release.sh build"
    if missing := [p.name for p in shipment.files() if not p.is_file()]:
        raise UserError(f"{shipment.folder} lacks {missing[0]}: {again}")
    lines = (shipment.folder / SUMS).read_text(errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if sums.keys() != {p.name for p in shipment.files()} - {SUMS}:
        raise UserError(f"{shipment.folder / SUMS} is of other files: {again}, with the same --base")
    for path in shipment.files():
        if path.name != SUMS and hashlib.sha256(path.read_bytes()).hexdigest() != sums[path.name]:
            raise UserError(f"{path} is not what {SUMS} says: delete it, and {again}")
    commit = git("rev-parse", "HEAD", cwd=shipment.project.root).strip()
    for wheel in shipment.wheels():
        found = verify.manifest_of(wheel).provenance
        if found.commit != commit or found.changed:
            raise UserError(f"{wheel.name} was built by {found.told}, and this is {commit}: {again}")


def _bill(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.cdx.json")


def main() -> None:
    try:
        cli(prog_name="ci/release.sh")
    except (OSError, GitError) as e:
        where = getattr(e, "filename", None) or "git"
        click.echo(f"Error: {where}: {e.brief if isinstance(e, GitError) else e.strerror or e}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
