"""Which releases of vLLM the package index has, and which of them no series was made for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.version import Version
from pypi_simple import DistributionPackage

from k3patches.errors import UserError
from k3patches.fetch import PROJECT
from k3patches.index import PipConfig, ask

# What patches/vX.Y.Z and VERSION can name: a final release, neither a candidate nor a post-release.
FINAL = re.compile(r"\d+(\.\d+)+")


def published(config: PipConfig) -> list[str]:
    """The final releases that an index of ``config`` has an sdist of, oldest first; yanked ones are none."""
    found: set[str] = set()
    trouble, answered = "no index is configured", False
    for answer in ask(PROJECT, config):
        if not answer.known:
            trouble = f"{answer.host} does not know {PROJECT}"
        elif answer.trouble:
            trouble = f"{answer.host}: {answer.trouble}"
        else:
            answered = True
            found.update(p.version for p in answer.packages if _final_sdist(p) and p.version)
    if not answered:
        raise UserError(
            f"cannot ask the package index which releases of vLLM there are ({trouble}): "
            f"check the network and pip's index-url"
        )
    return sorted(found, key=Version)


def missing(bases: Iterable[str], releases: Iterable[str]) -> list[str]:
    """The ``releases`` without a series, oldest first: newer than the newest base, or between two bases."""
    have = {Version(base) for base in bases}
    if not have:
        raise UserError("patches/ holds no series to start from: check out the project anew")
    return sorted((r for r in releases if Version(r) > min(have) and Version(r) not in have), key=Version)


def _final_sdist(package: DistributionPackage) -> bool:
    return (
        package.package_type == "sdist" and not package.is_yanked and FINAL.fullmatch(package.version or "") is not None
    )
