"""Python's garbage collector beside the million objects that an import of vLLM makes and nobody drops."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Call before the import, which takes a third longer while the collector looks through all of it time and again."""
    gc.set_threshold(100_000, 50, 1000)


def set_aside() -> None:
    """Call after the import, or before the end: either takes seconds where all of it is looked through once more."""
    gc.freeze()
