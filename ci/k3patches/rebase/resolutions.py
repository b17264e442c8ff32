"""What a person decided, kept so that the same rebase needs nobody the next time.

A folder of mails, one a patch that did not carry over by itself: the message is the resulting commit's, the
diff leads from the automatic merge, conflict markers included, to the result, as ``git show --remerge-diff``
shows it.  Where the order differs from the source's, patches were added or left out, a ``series`` file says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from k3patches.errors import UserError

ORDER_FILE = "series"
HEADER = "# The order of the fixes; '-' marks one whose patch was left out.\n"


@dataclass(frozen=True)
class Recorded:
    """A folder of resolutions; ``mails`` maps a patch's key to its file."""

    mails: dict[str, Path] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()


def load(folder: Path) -> Recorded:
    """Read ``folder``, which may not exist."""
    if not folder.is_dir():
        return Recorded()
    mails = {path.stem: path for path in sorted(folder.glob("*.patch"))}
    order, dropped = [], set()
    path = folder / ORDER_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if name := line.split("#", 1)[0].strip():
            if name.startswith("-"):
                dropped.add(name[1:])
            elif name in order:
                raise UserError(f"{path} lists {name} twice: drop one")
            else:
                order.append(name)
    return Recorded(mails, tuple(order), frozenset(dropped))


def order_file(order: list[str], dropped: list[str]) -> bytes:
    return (HEADER + "".join(f"{key}\n" for key in [*order, *(f"-{key}" for key in dropped)])).encode()
