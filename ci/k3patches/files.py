"""Writing a file so that nobody, not even after a kill, sees a half of it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write(path: Path, content: str | bytes) -> None:
    """Make ``content``, as UTF-8, what ``path`` holds; its folder is made, and what it held stays until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        new.replace(path)


def write_json(path: Path, data: Any) -> None:
    """:func:`write` ``data`` as JSON for people."""
    write(path, json.dumps(data, indent=1) + "\n")


def write_record(path: Path, record: DataclassInstance) -> None:
    """:func:`write` a dataclass's fields."""
    write_json(path, asdict(record))
