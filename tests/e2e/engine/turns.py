"""Whose turn it is on this machine's GPUs: many run at once, but who measures time does so alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Long enough for who waits to be served before the same process asks again.
_PAUSE = 0.2


class Turns:
    """A lock file that every process of every run on the machine opens.

    What it holds is given up by `close` or with the process: an engine goes on using the GPUs when nobody refers to
    this any more, until its own end.
    """

    def __init__(self, path: Path) -> None:
        # No file object, which would be closed together with this.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def close(self) -> None:
        os.close(self._file)

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
