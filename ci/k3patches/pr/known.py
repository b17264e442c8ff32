"""What upstream is known to do on the ground of each fix, from patches/pr/known.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from k3patches.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "known.toml"


class Harm(Enum):
    """What a user has without a fix, the worst first."""

    WRONG_NUMBERS = "wrong numbers"
    ERROR = "an error"
    COST = "time or memory"
    FEATURE = "a feature less"


@dataclass(frozen=True)
class Entry:
    """A pull request or an issue of upstream's: its ``number``, and ``what`` it has to do with the fix."""

    number: int
    kind: str
    what: str

    @property
    def link(self) -> str:
        return f"https://github.com/vllm-project/vllm/{'pull' if self.kind == 'pull' else 'issues'}/{self.number}"


@dataclass(frozen=True)
class Ground:
    """What is known of one fix, and the words to search upstream's pull requests for.

    ``symptom`` is what a user sees without the fix, in one sentence, and ``harm`` of which kind that is.
    """

    entries: tuple[Entry, ...] = ()
    search: tuple[str, ...] = ()
    harm: Harm | None = None
    symptom: str = ""


def load(folder: Path) -> dict[str, Ground]:
    """Read ``folder/known.toml``, by fix; without the file nothing is known."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            fix: Ground(
                tuple(
                    Entry(int(number), kind, str(what))
                    for kind in ("pull", "issue")
                    for number, what in table.get(kind, {}).items()
                ),
                tuple(map(str, table.get("search", []))),
                Harm(table["harm"]) if table.get("harm") else None,
                str(table.get("symptom", "")),
            )
            for fix, table in data.items()
        }
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as e:
        raise UserError(f"{path} is not as it should be ({e}): restore it from git") from None
