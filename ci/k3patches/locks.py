"""Locks that whoever comes second does not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from k3patches.errors import UserError


@contextmanager
def held(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file ``path``; where another process does, ``busy`` is the error.

    The lock is the operating system's, so a killed process leaves none behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(busy) from None
    try:
        yield
    finally:
        lock.release()
