"""Lay the patched files over the official wheel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from k3patches import tree as trees
from k3patches.errors import UserError
from k3patches.tree import Change
from k3patches.wheelfiles import VERSION_FILE, opened

# Parts of the source that no wheel holds and that nothing in a wheel is made from.
NOT_SHIPPED = ("tests/", "docs/", "examples/", "benchmarks/", ".buildkite/", ".github/")


def shipped(changes: Iterable[Change], official: Path) -> dict[str, bytes | None]:
    """The changes that belong into the wheel, by path.

    What would have to be compiled, or would change the wheel's metadata, is an error.
    """
    with opened(official) as wheel:
        members = set(wheel.namelist())
    result = {}
    for change in changes:
        if change.path.startswith(NOT_SHIPPED):
            continue
        if not (change.path.startswith("vllm/") and (change.path.endswith(".py") or change.path in members)):
            raise UserError(
                f"the series changes {change.path}, which a wheel is compiled or generated from: "
                f"build with --from-source"
            )
        if change.path == VERSION_FILE:
            raise UserError(f"the series changes {VERSION_FILE}, which every build stamps: leave it out of the patch")
        result[change.path] = change.content
    return result


def check_same_source(official: Path, tree: Path) -> None:
    """Make sure that the wheel's Python is the pristine source's, byte for byte.

    Otherwise the patched files would be laid over something they were not made for.
    """
    blobs = trees.pristine_blobs(tree, "vllm")
    with opened(official) as wheel:
        names = set(wheel.namelist())
        differing = [n for n in sorted(names & blobs.keys()) if trees.blob_id(wheel.read(n)) != blobs[n]]
    # A checkout has no _version.py; an sdist has the wheel's own.
    missing = [n for n in sorted(blobs.keys() - names) if n.endswith(".py")]
    if differing or missing:
        word = "differs from" if differing else "is missing in"
        raise UserError(
            f"{(differing or missing)[0]} of the source {word} {official.name} "
            f"({len(differing)} differ, {len(missing)} are missing): build with --from-source"
        )
