"""Check a built wheel from the outside, against the official one and the patched tree."""

from __future__ import annotations

import csv
import hashlib
import io
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import click
from installer.sources import WheelFile as InstallerWheel
from packaging.utils import parse_wheel_filename

from k3patches import manifest as manifests
from k3patches import sbom as sboms
from k3patches import tree as trees
from k3patches.errors import UserError
from k3patches.manifest import Manifest
from k3patches.wheelfiles import DAMAGE, VERSION_FILE, opened, set_version_file, stamped


class Failed(Exception):
    """A check did not hold; ``str()`` says where."""


@dataclass(frozen=True)
class Subject:
    """The wheel under check.

    ``official`` is the wheel it was laid over, ``None`` for one built from source.
    """

    path: Path
    tree: Path
    official: Path | None
    files: dict[str, str]
    info: str
    manifest: Manifest
    version_file: bytes
    metadata: bytes
    wheel: bytes
    bill: bytes | None


def verify(wheel: Path, tree: Path, official: Path | None) -> None:
    """Run every check and print one line each; the first that fails is the error."""
    subject = _subject(wheel, tree, official)
    checks: list[Callable[[Subject], str]] = [_record, _tags, _version, _patched, _untouched, _bill, _compiles]
    for check in checks:
        name = check.__name__.lstrip("_")
        try:
            click.echo(f"  {name}: {check(subject)}", err=True)
        except Failed as e:
            raise UserError(f"{wheel.name} fails the check '{name}': {e}; do not use it, build it again") from None


def manifest_of(path: Path) -> Manifest:
    """What a wheel of this project says it was made of."""
    with opened(path) as wheel:
        name = f"{wheel.dist_info_path}/{manifests.FILE}"
        if name not in wheel.namelist():
            raise UserError(f"{path.name} carries no {manifests.FILE}: it was not built by this project")
        try:
            return Manifest.parse(wheel.read(name))
        except ValueError as e:
            raise UserError(f"{path.name}: {e}") from None


def member(path: Path, name: str) -> bytes:
    """A file of the wheel's dist-info folder."""
    with opened(path) as wheel:
        full = f"{wheel.dist_info_path}/{name}"
        if full not in wheel.namelist():
            raise UserError(f"{path.name} carries no {name}: build it again, or name a wheel of this project")
        content: bytes = wheel.read(full)
    return content


def _subject(path: Path, tree: Path, official: Path | None) -> Subject:
    manifest = manifest_of(path)
    with opened(path) as wheel:
        info = wheel.dist_info_path
        for name in (VERSION_FILE, f"{info}/METADATA", f"{info}/WHEEL"):
            if name not in wheel.namelist():
                raise UserError(f"{path.name} lacks {name}: do not use it, build it again")
        return Subject(
            path=path,
            tree=tree,
            official=official,
            files=_hashes(path),
            info=info,
            manifest=manifest,
            version_file=wheel.read(VERSION_FILE),
            metadata=wheel.read(f"{info}/METADATA"),
            wheel=wheel.read(f"{info}/WHEEL"),
            bill=wheel.read(f"{info}/{sboms.FILE}") if f"{info}/{sboms.FILE}" in wheel.namelist() else None,
        )


def _hashes(path: Path) -> dict[str, str]:
    """RECORD's hash of each member (for RECORD itself: the empty string)."""
    with opened(path) as wheel:
        rows = csv.reader(io.StringIO(wheel.read(wheel.record_path).decode()))
        return {name: digest for name, digest, _ in rows}


def _record(s: Subject) -> str:
    with InstallerWheel.open(s.path) as wheel:
        try:
            wheel.validate_record(validate_contents=True)
        except InstallerWheel.validation_error as e:
            raise Failed("; ".join(e.issues)) from None
        except DAMAGE as e:
            raise Failed(str(e)) from None
    with opened(s.path) as zipped:
        names = zipped.namelist()
    if sorted(names) != sorted(s.files):
        odd = sorted(set(names) ^ set(s.files)) or ["a member that stands twice"]
        raise Failed(f"RECORD and the archive disagree on {odd[0]}")
    return f"complete and right, {len(names)} files"


def _tags(s: Subject) -> str:
    tags = {str(t) for t in parse_wheel_filename(s.path.name)[3]}
    inside = set(message_from_bytes(s.wheel).get_all("Tag") or [])
    if inside != tags:
        raise Failed(f"the file name says {sorted(tags)}, WHEEL says {sorted(inside)}")
    if s.official and tags != {str(t) for t in parse_wheel_filename(s.official.name)[3]}:
        raise Failed(f"{sorted(tags)} are not {s.official.name}'s")
    return " ".join(sorted(tags))


def _version(s: Subject) -> str:
    version = str(parse_wheel_filename(s.path.name)[1])
    said = {
        "METADATA": str(message_from_bytes(s.metadata)["Version"]),
        manifests.FILE: s.manifest.version,
        "the dist-info folder": s.info.removeprefix("vllm-").removesuffix(".dist-info"),
    }
    for where, other in said.items():
        if other != version:
            raise Failed(f"the file name says {version}, {where} says {other}")
    if set_version_file(s.version_file, version) != s.version_file:
        raise Failed(f"{VERSION_FILE} says another version than {version}")
    return version


def _patched(s: Subject) -> str:
    expected = {c.path: c.sha256 for c in trees.changes(s.tree) if c.path in s.files or c.path in s.manifest.files}
    if expected != s.manifest.files:
        odd = sorted(k for k in expected.keys() | s.manifest.files.keys() if expected.get(k) != s.manifest.files.get(k))
        raise Failed(f"{manifests.FILE} and the patched tree disagree on {odd[0]}")
    for name, digest in expected.items():
        if s.files.get(name) != (digest and _as_record(digest)):
            raise Failed(f"{name} is not the patched tree's")
    return f"{len(expected)} files as in the patched tree"


def _untouched(s: Subject) -> str:
    if s.official is None:
        return "nothing to compare with (built from source)"
    official = _hashes(s.official)
    with opened(s.official) as wheel:
        old_info = wheel.dist_info_path
        for name in (VERSION_FILE, f"{old_info}/METADATA", f"{old_info}/WHEEL"):
            content = stamped(name, wheel.read(name), old_info, s.path.name)
            official[name] = _as_record(hashlib.sha256(content).hexdigest())
    allowed = s.manifest.files.keys()
    expected = {name.replace(old_info, s.info, 1): digest for name, digest in official.items()}
    ours = {f"{s.info}/{manifests.FILE}", f"{s.info}/{sboms.FILE}"}
    found = {name: digest for name, digest in s.files.items() if name not in ours}
    odd = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n) and n not in allowed)
    if odd:
        raise Failed(f"{odd[0]} is not {s.official.name}'s")
    return f"{len(found.keys() - allowed)} files as in {s.official.name}"


def _bill(s: Subject) -> str:
    if s.bill is None:
        raise Failed(f"{sboms.FILE} is missing")
    if s.bill != sboms.render(s.manifest, s.metadata):
        raise Failed(f"{sboms.FILE} is not what {manifests.FILE} and METADATA say")
    return f"{sboms.FILE} follows from {manifests.FILE}, built by {s.manifest.provenance.told}"


def _compiles(s: Subject) -> str:
    count = 0
    with opened(s.path) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py"):
                try:
                    compile(wheel.read(name), name, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as e:
                    raise Failed(f"{name}: {e}") from None
                count += 1
    return f"{count} Python files"


def _as_record(sha256: str) -> str:
    return "sha256=" + urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
