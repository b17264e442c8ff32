"""How two states of one patch file differ, in words."""

from __future__ import annotations

import re

POSITION = re.compile(r"^@@ -\S+ \+\S+ @@", re.M)
BLOBS = re.compile(r"^index [0-9a-f]+\.\.[0-9a-f]+", re.M)


def how(old: bytes, new: bytes) -> str:
    """A word on what separates them; the least that it can be comes first."""
    texts = [side.decode(errors="replace") for side in (old, new)]
    plain = [POSITION.sub("@@", BLOBS.sub("index", text)) for text in texts]
    if plain[0] == plain[1]:
        return "line numbers and blob ids"
    if _changes(texts[0]) == _changes(texts[1]):
        return "context and blob ids"
    return "merged with the edit"


def _changes(text: str) -> list[str]:
    """The lines that the patch adds and takes away, and the files that it does so in; and its message."""
    message, _, diff = text.partition("\ndiff --git ")
    message = message.partition("\n---\n")[0]
    return [message, *(line for line in diff.splitlines() if line.startswith(("+", "-", "diff --git")))]
