"""The entry of patches/CHANGELOG.md for a revision of the series."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from k3patches.errors import UserError

FILE = "CHANGELOG.md"
HEADING = re.compile(r"^## \[(Unreleased|k3\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """What is new in a revision; ``date`` is empty where it has none."""

    name: str
    date: str
    text: str


def entries(path: Path) -> list[Entry]:
    """All entries, the newest first, as the file has them."""
    if not path.is_file():
        raise UserError(f"{path} is not there: restore it from git")
    text = path.read_text(encoding="utf-8")
    found = list(HEADING.finditer(text))
    ends = [m.start() for m in found[1:]] + [len(text)]
    return [Entry(m[1], m[2] or "", text[m.end() : end].strip()) for m, end in zip(found, ends, strict=True)]


def released(path: Path, revision: int, releases: Iterable[str], fixes: Iterable[str]) -> Entry:
    """The entry of k3.``revision``, fit to be published.

    It has a date and a text, nothing waits under Unreleased, and it and the entries before it name every one of
    ``releases`` and, of ``fixes``, those that have a patch.
    """
    all_entries = entries(path)
    name = f"k3.{revision}"
    entry = next((e for e in all_entries if e.name == name), None)
    if entry is None or not entry.date or not entry.text:
        raise UserError(f"{path} has no dated entry for {name}: write one below '## [{name}] - YYYY-MM-DD'")
    if waiting := next((e for e in all_entries if e.name == "Unreleased" and e.text), None):
        line = waiting.text.splitlines()[0]
        raise UserError(f"{path} still has {line!r} under Unreleased: move it to {name}, or raise VERSION")
    told = "\n".join(e.text for e in all_entries[all_entries.index(entry) :])
    words = set(re.findall(r"[\w.-]*\w", told))
    if missing := [what for what in (*releases, *fixes) if what not in words]:
        raise UserError(f"{path} does not name {', '.join(missing)} up to {name}: say what it is for the user")
    return entry
