"""The order in which the patches of a series go upstream: the most valuable and the smallest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from k3patches.pr import stack
from k3patches.pr.known import Ground, Harm
from k3patches.series import Patch

HARMS = list(Harm)


def pending(patches: Sequence[Patch], grounds: Mapping[str, Ground]) -> list[Patch]:
    """The patches that upstream is still to get.

    Each comes after those that it depends on; of those that could come next, the one against the worst harm does, and
    of these the one with the fewest lines of code.
    """
    waiting = {patch.name: patch for patch in patches if stack.pending(patch)}
    fixes = {fix: name for name, patch in waiting.items() for fix in patch.contracts}
    sorter = TopologicalSorter(
        {name: [fixes[fix] for fix in patch.depends_on if fix in fixes] for name, patch in waiting.items()}
    )
    sorter.prepare()
    ready: list[str] = []
    ordered = []
    while sorter.is_active():
        ready += sorter.get_ready()
        first = min(ready, key=lambda name: (_harm(waiting[name], grounds), waiting[name].lines[0], name))
        ready.remove(first)
        ordered.append(waiting[first])
        sorter.done(first)
    return ordered


def _harm(patch: Patch, grounds: Mapping[str, Ground]) -> int:
    """The worst of its fixes' harms; one of which nothing is known counts as the least."""
    harms = [grounds[fix].harm for fix in patch.contracts if fix in grounds]
    return min((HARMS.index(harm) for harm in harms if harm), default=len(HARMS))
