"""Make a wheel wrong in one way and right in every other."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

Content = bytes | Callable[[bytes], bytes] | None


def digest(content: bytes) -> str:
    """As RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def rewrite(path: Path, changes: Mapping[str, Content], *, record: bool = True) -> Path:
    """Replace, add or (``None``) drop members of a wheel, in place; RECORD follows unless told not to.

    A change of RECORD itself comes last.
    """
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    record_name = next(name for name in files if name.endswith(".dist-info/RECORD"))
    for name, change in changes.items():
        if name != record_name:
            _change(files, name, change)
    if record:
        buffer = io.StringIO()
        rows = csv.writer(buffer, lineterminator="\n")
        rows.writerows([n, digest(c), len(c)] for n, c in files.items() if n != record_name)
        rows.writerow([record_name, "", ""])
        files[record_name] = buffer.getvalue().encode()
    if record_name in changes:
        _change(files, record_name, changes[record_name])
    with zipfile.ZipFile(path, "w") as new:
        for name, content in files.items():
            new.writestr(name, content)
    return path


def _change(files: dict[str, bytes], name: str, change: Content) -> None:
    if change is None:
        del files[name]
    else:
        files[name] = change(files[name]) if callable(change) else change
