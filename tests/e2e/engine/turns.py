"""Whose turn it is on this machine's GPUs: many run at once, but who measures time does so alone."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

# Long enough for who waits to be served before the same process asks again.
_PAUSE = 0.2


class Turns:
    """A lock file that every process of every run on the machine opens; its end gives up what it holds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def close(self) -> None:
        self._file.close()

    def share(self) -> None:
        """Use the GPUs, beside others that do, from when nobody measures."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def rest(self) -> None:
        """Use them no more."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use them while nobody else does; between two of these come the others that wait for one."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.rest()
            time.sleep(_PAUSE)
