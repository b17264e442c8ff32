"""Write the series and the resolutions, whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from k3patches import base as bases
from k3patches import messages, refresh, series
from k3patches.base import Base
from k3patches.rebase.gitwork import Commit

OPENING = "# Applied in this order to {label}; ./build.sh lint checks them.\n"


def patches(tree: Path, commits: list[Commit]) -> dict[str, bytes]:
    """The patch files of ``commits``, numbered in order, each named after its first fix."""
    found = {}
    for number, commit in enumerate(commits, 1):
        fix = messages.fixes(commit.message)[0]
        found[f"{number:04d}-{fix}.patch"] = refresh.export(tree, commit.id)
    return found


def series_file(names: list[str], label: str, old: Path) -> bytes:
    """The series file; the comments that open an ``old`` one stay."""
    path = old / series.SERIES_FILE
    opening = []
    for line in path.read_text().splitlines(keepends=True) if path.is_file() else [OPENING.format(label=label)]:
        if not line.startswith("#"):
            break
        opening.append(line)
    return "".join([*opening, *(f"{name}\n" for name in names)]).encode()


def base_file(base: Base, native: Mapping[str, str], absent: Mapping[str, str]) -> bytes:
    return bases.render(replace(base, native=dict(native), absent=dict(absent))).encode()


def others(folder: Path) -> dict[str, bytes]:
    """What else a person keeps in a series' folder, which stays."""
    ours = (series.SERIES_FILE, bases.FILE)
    return {name: data for name, data in contents(folder).items() if not name.endswith(".patch") and name not in ours}


def contents(folder: Path) -> dict[str, bytes]:
    """All the files in ``folder``, by name; none where it is not there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether ``folder`` holds these files and no other; a folder that is not there holds none."""
    there = {str(p.relative_to(folder)): p for p in folder.rglob("*") if not p.is_dir()} if folder.is_dir() else {}
    return there.keys() == files.keys() and all(there[name].read_bytes() == data for name, data in files.items())


def fingerprint(folder: Path) -> str:
    """One digest of all the files in ``folder``, their names included; of none where it is not there."""
    digest = hashlib.sha256()
    for name, data in sorted(contents(folder).items()):
        for part in (name.encode(), data):
            digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()


def put(folder: Path, files: Mapping[str, bytes], stage: Path) -> None:
    """Make ``folder`` hold these files, and remove it where there are none.

    All is made in ``stage``, on the same file system; :func:`mend` finishes what a kill interrupts.
    """
    new, old = stage / "new", stage / "old"
    shutil.rmtree(stage, ignore_errors=True)
    new.mkdir(parents=True)
    for name, data in files.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(data)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(old)
    if files:
        new.rename(folder)
    shutil.rmtree(stage)
    if not files and folder.parent.name == "resolutions" and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def mend(folder: Path, stage: Path) -> None:
    """Where a kill came between the old folder's going and the new one's coming, put the new one there."""
    if (stage / "old").is_dir() and not folder.exists() and (stage / "new").is_dir() and any((stage / "new").iterdir()):
        (stage / "new").rename(folder)
    shutil.rmtree(stage, ignore_errors=True)
