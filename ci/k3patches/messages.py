"""Commit messages: title, text and trailers, these by the rules of ``git interpret-trailers``, not configured.

Trailers are the last paragraph, where that is not the title: all lines of it, or at least a quarter of them if one is
a line that git itself writes. A value goes on in lines that begin with white space.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

# The trailers that only this project reads; an exported pull request loses them.
CONTRACT, DEPENDS_ON, UPSTREAM_STATUS = "Contract", "Depends-On", "Upstream-Status"
OWN = (CONTRACT, DEPENDS_ON, UPSTREAM_STATUS)
SIGNED, PICKED = "Signed-off-by: ", "(cherry picked from commit "
LINE = re.compile(r"([A-Za-z0-9-]+)[ \t]*:(.*)", re.DOTALL)


@dataclass(frozen=True)
class Trailer:
    """One of them as it is written, in one line or more; without a ``key`` it is another line that stands there."""

    text: str

    @property
    def key(self) -> str:
        match = LINE.match(self.text)
        return match[1] if match else ""

    @property
    def value(self) -> str:
        """What it says, in one line."""
        match = LINE.match(self.text)
        return " ".join(line.strip() for line in match[2].split("\n")).strip() if match else self.text

    @property
    def ids(self) -> list[str]:
        """The fixes that it names."""
        return [fix for fix in re.split(r"[,\s]+", self.value) if fix]


@dataclass(frozen=True)
class Message:
    """A message's title and text, and its trailers."""

    body: str
    trailers: tuple[Trailer, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([self.body, *(["\n".join(t.text for t in self.trailers)] if self.trailers else [])]) + "\n"

    def values(self, key: str) -> list[str]:
        return [trailer.value for trailer in self.trailers if trailer.key == key]

    def ids(self, key: str) -> list[str]:
        """The fixes that the trailers of this key name."""
        return [fix for trailer in self.trailers if trailer.key == key for fix in trailer.ids]


def parse(message: str) -> Message:
    """The parts of ``message``; written again, they are the same bytes where one empty line is between them."""
    lines = message.rstrip().split("\n")
    blank = [at for at, line in enumerate(lines) if not line.strip()]
    start = blank[-1] + 1 if blank else len(lines)
    if not _are_trailers(lines[start:]):
        return Message("\n".join(lines))
    texts: list[str] = []
    for line in lines[start:]:
        if line[0].isspace() and texts:
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return Message("\n".join(lines[: start - 1]), tuple(map(Trailer, texts)))


def fixes(message: str) -> list[str]:
    """The fixes that a commit is for."""
    return parse(message).ids(CONTRACT)


def without_own(message: str) -> str:
    """``message`` without the trailers that only this project reads."""
    parsed = parse(message)
    return str(Message(parsed.body, tuple(t for t in parsed.trailers if t.key not in OWN)))


def trimmed(message: str, contracts: Collection[str], depends_on: Collection[str]) -> str:
    """``message`` with only these ids left in its Contract and Depends-On trailers; empty trailers go."""
    allowed = {CONTRACT: contracts, DEPENDS_ON: depends_on}
    parsed, trailers = parse(message), []
    for trailer in parsed.trailers:
        if trailer.key in allowed:
            ids = [fix for fix in trailer.ids if fix in allowed[trailer.key]]
            if not ids:
                continue
            if ids != trailer.ids:
                trailer = Trailer(f"{trailer.key}: {', '.join(ids)}")
        trailers.append(trailer)
    return str(Message(parsed.body, tuple(trailers)))


def renamed(message: str, old: str, new: str) -> str:
    """``message`` with the file name ``new`` where it says ``old``."""
    return re.sub(rf"(?<![\w/.-]){re.escape(old)}(?![\w])", new, message)


def subject(message: str) -> str:
    return message.split("\n\n", 1)[0].replace("\n", " ").strip()


def _are_trailers(paragraph: list[str]) -> bool:
    trailers = others = continued = 0
    written_by_git = False
    # From the end, since white space continues whatever is above it.
    for line in reversed(paragraph):
        if line.startswith((SIGNED, PICKED)):
            written_by_git = True
        if line.startswith(PICKED) or LINE.match(line):
            trailers, continued = trailers + 1, 0
        elif line[0].isspace():
            continued += 1
        else:
            others, continued = others + 1 + continued, 0
    others += continued
    return trailers * 3 >= others if written_by_git else trailers > 0 and not others
