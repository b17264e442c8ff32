"""How a rebase can end, as exit codes for CI."""

from __future__ import annotations

import enum

from k3patches.errors import UserError


class Result(enum.IntEnum):
    """The exit code of a rebase."""

    REBASED = 0
    NOTHING_TO_DO = 3
    NEEDS_A_PERSON = 4
    BROKEN = 5

    def __str__(self) -> str:
        return self.name.replace("_", " ").lower()


class NeedsPerson(UserError):
    """Somebody must edit or decide; the work tree is kept for it."""

    exit_code = Result.NEEDS_A_PERSON


class Broken(UserError):
    """A contract that no patch can be blamed for does not hold, or the contracts cannot run."""

    exit_code = Result.BROKEN
