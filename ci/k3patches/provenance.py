"""Where a wheel comes from, beside its pins: the project's own revision, and the tools that its bytes depend on.

In the manifest it is a predicate in the terms of SLSA (https://slsa.dev/spec/v1.0/provenance), so that an attestation
of the wheel can take it as it is.  It holds neither paths nor times of the build: the same checkout gives the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from k3patches.base import Artifact
from k3patches.git import GitError, git

BUILDER = "k3-patches:build.sh"
# What a wheel is made from.  A change elsewhere in the checkout is none of its.
INPUTS = ("VERSION", "build.sh", "ci", "patches")
TOOLS = ("cyclonedx-python-lib", "wheel")


@dataclass(frozen=True)
class Provenance:
    """``commit`` is the checkout's, ``None`` where it is no git checkout, ``changed`` whether it had other inputs.

    ``epoch`` is what SOURCE_DATE_EPOCH means: the time that new files are dated.
    """

    commit: str | None
    changed: bool
    epoch: int
    tools: dict[str, str]

    @property
    def told(self) -> str:
        """The revision in words."""
        if self.commit is None:
            return "a folder without git"
        return f"commit {self.commit}" + (", changed since" if self.changed else "")

    def to_slsa(self, version: str, build: str, pins: Mapping[str, Artifact], patches: Sequence[str]) -> dict[str, Any]:
        """The predicate for a wheel of ``version``, made by ``build`` (overlay or source) from ``pins``."""
        project: dict[str, Any] = {"name": "k3-patches", "annotations": {"changed": self.changed}}
        if self.commit is not None:
            project["digest"] = {"gitCommit": self.commit}
        archives = [{"name": pin.filename, "digest": {"sha256": pin.sha256}} for _, pin in sorted(pins.items())]
        return {
            "buildDefinition": {
                "buildType": f"k3-patches:{build}/1",
                "externalParameters": {"version": version, "patches": list(patches), "SOURCE_DATE_EPOCH": self.epoch},
                "resolvedDependencies": [project, *archives],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": dict(self.tools)}},
        }

    @classmethod
    def from_slsa(cls, predicate: Mapping[str, Any]) -> Provenance:
        """Read what :meth:`to_slsa` wrote.  KeyError, TypeError and the like say that it is something else."""
        definition = predicate["buildDefinition"]
        project = definition["resolvedDependencies"][0]
        commit = project["digest"]["gitCommit"] if "digest" in project else None
        changed = project["annotations"]["changed"]
        epoch = definition["externalParameters"]["SOURCE_DATE_EPOCH"]
        tools = predicate["runDetails"]["builder"]["version"]
        texts = [*tools, *tools.values(), *([] if commit is None else [commit])]
        if not all(isinstance(t, str) for t in texts) or type(epoch) is not int or type(changed) is not bool:
            raise TypeError("an entry of the provenance is of another kind")
        return cls(commit, changed, epoch, dict(tools))


def here(root: Path, epoch: int) -> Provenance:
    """That of a wheel which is built now, by the checkout ``root``."""
    tools = {name: version(name) for name in TOOLS} | {"zlib": zlib.ZLIB_RUNTIME_VERSION}
    # The checkout may be somebody else's, as in a container; what runs here is its code already.
    trust = ("-c", f"safe.directory={root}")
    try:
        if Path(git(*trust, "rev-parse", "--show-toplevel", cwd=root).strip()) != root.resolve():
            return Provenance(None, False, epoch, tools)
        commit = git(*trust, "rev-parse", "--verify", "HEAD^{commit}", cwd=root).strip()
        changed = bool(git(*trust, "status", "--porcelain", "--", *INPUTS, cwd=root).strip())
    except GitError:
        return Provenance(None, False, epoch, tools)
    return Provenance(commit, changed, epoch, tools)
