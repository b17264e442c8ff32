"""The wheel stage: make it in the build folder, verify it there, and only then publish it."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
from packaging.utils import parse_wheel_filename

from k3patches import fetch, manifest, overlay, sbom, sourcebuild, tree, verify, wheelfiles
from k3patches.base import Artifact, Base
from k3patches.errors import UserError
from k3patches.manifest import Manifest
from k3patches.provenance import Provenance
from k3patches.series import Patch
from k3patches.tree import Change


@dataclass(frozen=True)
class SourceBuild:
    """How to run vLLM's setup.py: with which interpreter, and whether pip isolates the build from it."""

    python: str
    isolated: bool


@dataclass(frozen=True)
class Official:
    """The official wheel to lay the patched files over."""

    path: Path
    pin: Artifact


def applied(patched: Path, patches: Sequence[Patch]) -> list[Patch]:
    """The patches of which the tree ``patched`` was made, still as they are in the series."""
    state = tree.require_ours(patched).patches
    by_name = {p.name: p for p in patches}
    if any(name not in by_name or by_name[name].sha256 != sha for name, sha in state):
        raise UserError(f"{patched} was made of another state of the series: run apply again")
    return [by_name[name] for name, _ in state]


def make(
    base: Base,
    revision: int,
    patches: Sequence[Patch],
    patched: Path,
    how: Official | SourceBuild,
    stage: Path,
    out: Path,
    provenance: Provenance,
) -> Path:
    """Build the wheel of the tree ``patched`` and return it in ``out``.

    ``patches`` is the whole series; the wheel's version says so when the tree holds only some of it.
    ``stage`` is a folder of the build's own.
    """
    chosen = applied(patched, patches)
    version = manifest.version(base, revision, chosen, whole=len(chosen) == len(patches))
    changes = tree.changes(patched)
    with tree.replacing(stage) as folder:
        if isinstance(how, SourceBuild):
            model = sourcebuild.build(patched, version, folder, how.python, how.isolated)
            name, pins, shipped = model.name, {}, _shipped_by_setup(changes, model)
            # Built from the patched tree, it has the changes already.
            replaced: dict[str, bytes | None] = {}
        else:
            overlay.check_same_source(how.path, patched)
            model, pins = how.path, {"wheel": how.pin}
            name = manifest.wheel_name(model.name, base, version)
            replaced = overlay.shipped(changes, model)
            shipped = set(replaced)
        record = Manifest(
            version=str(parse_wheel_filename(name)[1]),
            base=base.release,
            commit=base.commit,
            build="source" if isinstance(how, SourceBuild) else "overlay",
            source=tree.require_ours(patched).source,
            pins={"sdist": base.sdist, **pins},
            patches=[manifest.record(p) for p in chosen],
            provenance=provenance,
            files={c.path: c.sha256 for c in changes if c.path in shipped},
        )
        new = folder / "new" / name
        new.parent.mkdir()
        added = {manifest.FILE: record.dump(), sbom.FILE: sbom.render(record, wheelfiles.metadata(model, name))}
        wheelfiles.rewrite(model, new, replaced, added, base.epoch)
        click.echo(f"verifying {name}", err=True)
        verify.verify(new, patched, None if isinstance(how, SourceBuild) else how.path)
        digest = fetch.sha256(new)
        target = _publish(new, out, digest)
    click.echo(f"sha256 {digest}", err=True)
    return target


def _shipped_by_setup(changes: Sequence[Change], wheel: Path) -> set[str]:
    """The changed files that setup.py packages; one that the series deletes counts as well."""
    with wheelfiles.opened(wheel) as built:
        members = set(built.namelist())
    return {c.path for c in changes if c.path in members or (c.content is None and c.path.startswith("vllm/"))}


def requirements(wheel: Path) -> Path:
    """Where the line lies with which pip's hash mode installs ``wheel``."""
    return wheel.with_name(f"{wheel.name}.requirements.txt")


def _publish(wheel: Path, out: Path, digest: str) -> Path:
    """Put a finished wheel into ``out`` in one step, and then its hash beside it."""
    target, pending = out / wheel.name, requirements(out / f".{wheel.name}")
    # pip takes the folder as seen from the file that names it.
    hashed = f"--no-index\n--find-links .\nvllm=={parse_wheel_filename(wheel.name)[1]} --hash=sha256:{digest}\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        pending.write_text(hashed)
        try:
            wheel.rename(target)
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            # What killed builds left there; this one holds the project's lock.
            for stale in out.glob(f".{wheel.name}.*"):
                if stale != pending:
                    shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{wheel.name}.", dir=out) as folder:
                copy = Path(folder) / wheel.name
                shutil.copyfile(wheel, copy)
                copy.rename(target)
        pending.rename(requirements(target))
    except OSError as e:
        with suppress(OSError):
            pending.unlink()
        raise UserError(f"cannot write the wheel to {out} ({e.strerror}): name another folder with --out") from None
    return target
