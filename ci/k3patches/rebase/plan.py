"""Which patches go to the target, and in what order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from k3patches.rebase.resolutions import Recorded
from k3patches.series import Patch


@dataclass(frozen=True)
class Candidate:
    """A patch of a base's series, and those of its fixes for which no nearer base has one."""

    patch: Patch
    release: str
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One commit of the target's series; ``key`` is its first fix, ``candidate`` what is carried, if anything."""

    key: str
    fixes: tuple[str, ...]
    candidate: Candidate | None = None


def candidates(series: Sequence[tuple[str, Sequence[Patch]]]) -> list[Candidate]:
    """For each fix the patch of the nearest base that has one; ``series`` comes nearest base first.

    The nearest base gives the order.  A patch that only an older base has takes the place that the order
    there gives it: behind the last one before it that is here as well.
    """
    found: list[Candidate] = []
    covered: set[str] = set()
    for release, patches in series:
        for place, patch in enumerate(patches):
            missing = tuple(fix for fix in patch.contracts if fix not in covered)
            if missing:
                found.insert(_behind(found, patches[:place]), Candidate(patch, release, missing))
                covered.update(missing)
    return found


def steps(found: Sequence[Candidate], failing: Collection[str], recorded: Recorded) -> tuple[list[Step], list[Step]]:
    """What is to be carried, by the candidates' order alone and by the recorded one.

    A patch is for those of its fixes that do not hold on the target by themselves.
    """
    plain = []
    for candidate in found:
        if fixes := tuple(fix for fix in candidate.fixes if fix in failing):
            plain.append(Step(fixes[0], fixes, candidate))
    left = {step.key: step for step in plain if step.key not in recorded.dropped}
    ordered = []
    for key in recorded.order:
        if key in left:
            ordered.append(left.pop(key))
        elif key in recorded.mails and key in failing:
            ordered.append(Step(key, (key,)))
    if not recorded.order:
        return plain, list(left.values())
    for step in left.values():
        before = [s.key for s in plain[: plain.index(step)]]
        place = max((i + 1 for i, s in enumerate(ordered) if s.key in before), default=0)
        ordered.insert(place, step)
    return plain, ordered


def _behind(found: Sequence[Candidate], before: Sequence[Patch]) -> int:
    for patch in reversed(before):
        for place, candidate in reversed(list(enumerate(found))):
            if set(patch.contracts) & set(candidate.patch.contracts):
                return place + 1
    return 0
