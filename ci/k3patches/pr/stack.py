"""Which patches a pull request needs below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3patches.errors import UserError
from k3patches.series import Patch

PENDING = ("Pending", "Submitted")


def find(patches: Sequence[Patch], wanted: str) -> Patch:
    """The patch that ``wanted``, a number, a fix's id or a file's name, means."""
    for patch in patches:
        if wanted in (patch.number, patch.name, patch.name.removesuffix(".patch"), *patch.contracts):
            return patch
    names = ", ".join(p.name.removesuffix(".patch") for p in patches) or "none"
    raise UserError(f"no patch {wanted} in this series: it has {names}")


def pending(patch: Patch) -> bool:
    """Whether upstream is still to get it."""
    return patch.upstream_status.startswith(PENDING)


def below(patches: Sequence[Patch], patch: Patch, also: Sequence[Patch], lacking: Callable[[str], bool]) -> list[Patch]:
    """The patches that ``patch`` depends on, directly or not, in the series' order, and those wanted ``also``.

    A dependency on a fix that upstream is not ``lacking`` needs none.
    """
    if late := [other for other in also if patches.index(other) >= patches.index(patch)]:
        raise UserError(f"{late[0].name} does not come before {patch.name} in the series: it cannot be below it")
    found = {other.name for other in also}
    todo = [patch, *also]
    while todo:
        for fix in todo.pop().depends_on:
            other = next((p for p in patches if fix in p.contracts), None)
            if other is None:
                raise UserError(f"{patch.name} depends on {fix}, for which the series has no patch: mend its trailer")
            if other.name not in found and lacking(fix):
                found.add(other.name)
                todo.append(other)
    return [p for p in patches if p.name in found]
