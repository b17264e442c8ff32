"""What a rebase that stopped must remember to go on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from k3patches import files
from k3patches.errors import UserError

FILE = "state.json"


@dataclass
class State:
    """Kept in the rebase's folder.

    ``person``: somebody was asked to edit the tree, so that it may hold work of theirs.
    ``waiting``: the tree is theirs now; otherwise ``head`` is the last commit that the engine left whole.
    ``stopped`` is the key of the patch that waits, if it is one; ``dropped`` those that a person left out.
    ``asked`` are the keys of patches that a person was asked about; ``series`` is what the target's series was when
    the rebase began.
    """

    target: str
    git: str | None
    bases: list[str]
    person: bool = False
    waiting: bool = False
    head: str = ""
    stopped: str | None = None
    dropped: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    seconds: list[tuple[str, float]] = field(default_factory=list)
    series: str = ""

    def save(self, folder: Path) -> None:
        files.write_record(folder / FILE, self)


def load(folder: Path) -> State | None:
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
        raw["seconds"] = [(name, seconds) for name, seconds in raw["seconds"]]
        return State(**raw)
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: save what you need of {folder}, and start anew with --abort") from None
