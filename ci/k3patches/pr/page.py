"""The page patches/PULL_REQUESTS.md: what is to be sent upstream, in the order of :mod:`k3patches.pr.order`.

It is of the newest release's series, which is the nearest to upstream's main.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3patches.pr import order
from k3patches.pr.known import FILE, Ground
from k3patches.series import Patch

PAGE = "PULL_REQUESTS.md"
HEAD = f"""\
# Pull requests to send

<!-- written by ci/status.sh: edit pr/{FILE}, and run ci/status.sh --pages -->

The patches of vLLM {{release}}, in the order in which they are best sent: after those that they depend on, then what
does the most harm, then the smallest. `ci/export-pr.sh --all --base {{release}}` makes the branches and the texts in
the same order. What each has to do with upstream's own pull requests is in [TRACKING](TRACKING.md). Lines are those
that a patch adds.

| | patch | what users have without it | harm | code | tests | depends on |
|---|---|---|---|---|---|---|
"""


def page(release: str, patches: Sequence[Patch], grounds: Mapping[str, Ground]) -> str:
    """The page's text; ``patches`` are the release's series."""
    rows = []
    for rank, patch in enumerate(order.pending(patches, grounds), 1):
        mine = [grounds[fix] for fix in patch.contracts]
        symptoms = " ".join(dict.fromkeys(ground.symptom for ground in mine))
        harms = ", ".join(dict.fromkeys(ground.harm.value for ground in mine if ground.harm))
        code, tests = patch.lines
        needs = ", ".join(f"`{fix}`" for fix in patch.depends_on)
        link = f"[{patch.name.removesuffix('.patch')}](v{release}/{patch.name})"
        rows.append(f"| {rank} | {link} | {symptoms} | {harms} | {code} | {tests} | {needs} |\n")
    return HEAD.format(release=release) + "".join(rows)
