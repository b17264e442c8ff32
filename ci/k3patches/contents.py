"""What is in it?  Read an installed vLLM or a wheel file and say which fixes it holds, and whether they are whole."""

from __future__ import annotations

import base64
import csv
import enum
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from zipfile import ZipFile

from rich.console import Console
from rich.table import Table

from k3patches import manifest as manifests
from k3patches.errors import UserError
from k3patches.manifest import Manifest
from k3patches.wheelfiles import opened

Digest = Callable[[str], "str | None"]


class Verdict(enum.IntEnum):
    """The exit code of ``status``."""

    WHOLE = 0
    STOCK = 3
    TAMPERED = 4
    ABSENT = 5


@dataclass(frozen=True)
class Row:
    """One fix of one patch; ``state`` is ``ok``, or what is wrong with the patch's files."""

    fix: str
    patch: str
    upstream_status: str
    state: str


@dataclass(frozen=True)
class Status:
    """``damaged`` lists files that are not what RECORD or the manifest says, patched or not.

    ``built_by`` is the revision of this project that built it, in words.
    """

    where: str
    version: str
    verdict: Verdict
    rows: list[Row]
    damaged: list[str]
    built_by: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"verdict": self.verdict.name.lower()}, indent=1)


def of_wheel(path: Path) -> Status:
    """Look into a wheel file."""
    if not path.is_file():
        raise UserError(f"{path} is not there: name a wheel file")
    name, _, rest = path.name.partition("-")
    if name != "vllm":
        return Status(where=str(path), version="", verdict=Verdict.ABSENT, rows=[], damaged=[])
    with opened(path) as wheel:
        found, kept = {}, {}
        for member in dict.fromkeys(wheel.namelist()):
            # ZipFile's own reader: WheelFile's would stop at the first file that RECORD does not vouch for.
            with ZipFile.open(wheel, member) as f:
                content = f.read()
            found[member] = hashlib.sha256(content).hexdigest()
            if member.startswith(f"{wheel.dist_info_path}/"):
                kept[member.rpartition("/")[2]] = content
        record_path = wheel.record_path
    record = _record(kept["RECORD"].decode())
    unlisted = found.keys() - record.keys() - {record_path}
    return _judge(str(path), rest.partition("-")[0], kept.get(manifests.FILE), found.get, record, unlisted)


def of_environment(python: str | None) -> Status:
    """Look into the environment of an interpreter: ``python``, or the first of this one and PATH's that has vLLM."""
    candidates = [python] if python else [sys.executable, *filter(None, map(shutil.which, ("python3", "python")))]
    for candidate in candidates:
        dist = _installed(candidate)
        if dist:
            return _of_distribution(dist)
    return Status(where=" or ".join(candidates), version="", verdict=Verdict.ABSENT, rows=[], damaged=[])


def show(status: Status, console: Console) -> None:
    """Print ``status`` for a person."""
    if status.verdict is Verdict.ABSENT:
        console.print(f"no vLLM in {status.where}", soft_wrap=True)
        return
    console.print(f"vLLM {status.version} in {status.where}", soft_wrap=True)
    if status.verdict is Verdict.STOCK:
        console.print("stock: it carries no patch of this project")
        return
    if status.built_by:
        console.print(f"built by {status.built_by}", soft_wrap=True)
    table = Table("fix", "patch", "upstream", "files")
    for row in status.rows:
        table.add_row(row.fix, row.patch, row.upstream_status, row.state)
    console.print(table)
    if status.damaged:
        console.print(f"{len(status.damaged)} files are not what was built:", *status.damaged[:20], sep="\n  ")
    else:
        console.print("every file is what was built")


def _installed(python: str) -> Distribution | None:
    if os.sep in python:
        # Meant from where the user stands, not from /.  resolve() would follow the link out of a virtual environment.
        python = str(Path.cwd() / python)
    command = [python, "-c", "import json, sys; print(json.dumps(sys.path))"]
    try:
        # From /, and with -c, so that a source folder one happens to stand in is not taken for an installed vLLM.
        paths = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as e:
        raise UserError(f"{python} does not run as a Python interpreter: {e}") from None
    return next(iter(distributions(name="vllm", path=[p for p in paths if p])), None)


def _of_distribution(dist: Distribution) -> Status:
    def digest(name: str) -> str | None:
        path = Path(str(dist.locate_file(name)))
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    def text(name: str) -> str | None:
        try:
            return dist.read_text(name)
        except UnicodeDecodeError:
            return ""

    raw = text(manifests.FILE)
    record = _record(text("RECORD") or "")
    return _judge(str(dist.locate_file("")), dist.version, raw.encode() if raw is not None else None, digest, record)


def _record(text: str) -> dict[str, str]:
    """sha256 in hex of each file that RECORD vouches for; one that cannot be read is empty, which no file has."""
    found = {}
    try:
        for row in csv.reader(text.splitlines()):
            if len(row) == 3 and row[1].startswith("sha256="):
                try:
                    found[row[0]] = base64.urlsafe_b64decode(row[1][7:] + "==").hex()
                except ValueError:
                    found[row[0]] = ""
    except csv.Error:
        return {}
    return found


def _judge(
    where: str,
    version: str,
    raw: bytes | None,
    digest: Digest,
    record: dict[str, str],
    unlisted: Iterable[str] = (),
) -> Status:
    if raw is None:
        return Status(where, version, Verdict.STOCK, [], [])
    try:
        manifest = Manifest.parse(raw)
    except ValueError as e:
        return Status(where, version, Verdict.TAMPERED, [], [f"{manifests.FILE}: {e}"])
    # A patched file must be what the manifest says, even where RECORD was rewritten along with it.
    expected: dict[str, str | None] = {**record, **manifest.files}
    wrong = {name: state for name, want in sorted(expected.items()) if (state := _state(want, digest(name))) != "ok"}
    wrong |= dict.fromkeys(sorted(unlisted), "not in RECORD")
    if not record:
        wrong["RECORD"] = "missing or unreadable"
    if manifest.version != version:
        wrong[manifests.FILE] = f"says version {manifest.version}"
    verdict = Verdict.TAMPERED if wrong else Verdict.WHOLE
    damaged = [f"{name}: {state}" for name, state in wrong.items()]
    return Status(where, version, verdict, list(_rows(manifest, wrong)), damaged, manifest.provenance.told)


def _rows(manifest: Manifest, wrong: dict[str, str]) -> Iterator[Row]:
    for patch in manifest.patches:
        states = sorted({wrong[name] for name in patch.files if name in wrong})
        for fix in patch.contract:
            yield Row(fix, patch.name, patch.upstream_status, ", ".join(states) or "ok")


def _state(expected: str | None, found: str | None) -> str:
    if expected == found:
        return "ok"
    if expected is None:
        return "should not be there"
    return "missing" if found is None else "changed"
