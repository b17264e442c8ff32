"""What is remembered of an export: in state.json while one waits for a person, in export.json when it is done."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from k3patches import files
from k3patches.errors import UserError

STATE, EXPORTED = "state.json", "export.json"
Known = TypeVar("Known", "State", "Exported")


@dataclass
class State:
    """An export under way in its work folder.

    ``waiting``: the tree is a person's now; otherwise ``head`` is the last commit that was left whole.
    ``stopped`` is the name of the patch that waits to be carried; ``asked`` those that a person was asked about.
    """

    patch: str
    stack: list[str]
    upstream: str
    branch: str
    head: str
    gitdir: str | None = None
    ref: str | None = None
    waiting: bool = False
    stopped: str | None = None
    asked: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        files.write_record(folder / STATE, self)


@dataclass
class Exported:
    """A branch as it was written: ``commit`` on ``parent``, from the patch file with the checksum ``sha256``.

    ``branch`` is that of the repository ``gitdir``, or of the tree beside this file; ``imported`` the commit that
    became the patch again later.
    """

    patch: str
    sha256: str
    upstream: str
    parent: str
    commit: str
    branch: str
    gitdir: str | None = None
    ref: str | None = None
    imported: str | None = None

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, folder: Path) -> None:
        files.write_record(folder / EXPORTED, self)


def state(folder: Path) -> State | None:
    return _load(State, folder / STATE)


def exported(folder: Path) -> Exported | None:
    return _load(Exported, folder / EXPORTED)


def _load(kind: type[Known], path: Path) -> Known | None:
    if not path.is_file():
        return None
    try:
        return kind(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: save what you need of {path.parent}, and delete that folder") from None
