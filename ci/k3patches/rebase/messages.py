"""Read and rewrite the trailers of commit messages."""

from __future__ import annotations

import re
from collections.abc import Collection

from k3patches.series import CONTRACT, DEPENDS_ON

IDS = re.compile(rf"({CONTRACT}|{DEPENDS_ON}): (.+)")


def ids(message: str, trailer: str) -> list[str]:
    """The fix ids in ``trailer``'s lines in the last paragraph of ``message``."""
    found = []
    for line in _parts(message)[1]:
        if (match := IDS.fullmatch(line)) and match[1] == trailer:
            found += _split(match[2])
    return found


def trimmed(message: str, contracts: Collection[str], depends_on: Collection[str]) -> str:
    """``message`` with only these ids left in its Contract and Depends-On trailers; empty trailers go."""
    body, trailers = _parts(message)
    kept = []
    for line in trailers:
        if match := IDS.fullmatch(line):
            allowed = contracts if match[1] == CONTRACT else depends_on
            found = _split(match[2])
            if not (left := [fix for fix in found if fix in allowed]):
                continue
            if left != found:
                line = f"{match[1]}: {', '.join(left)}"
        kept.append(line)
    return "\n\n".join([*body, "\n".join(kept)]).rstrip("\n") + "\n"


def renamed(message: str, old: str, new: str) -> str:
    """``message`` with the file name ``new`` where it says ``old``."""
    return re.sub(rf"(?<![\w/.-]){re.escape(old)}(?![\w])", new, message)


def subject(message: str) -> str:
    return message.split("\n\n", 1)[0].replace("\n", " ").strip()


def _parts(message: str) -> tuple[list[str], list[str]]:
    *body, last = message.rstrip("\n").split("\n\n")
    return body, last.split("\n")


def _split(text: str) -> list[str]:
    return [i for i in re.split(r"[,\s]+", text) if i]
