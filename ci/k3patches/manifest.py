"""The JSON that a patched wheel carries in its dist-info: what it was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from k3patches.base import Artifact, Base
from k3patches.provenance import Provenance
from k3patches.series import Patch

FILE = "k3-patches.json"
SCHEMA = 2


@dataclass(frozen=True)
class PatchRecord:
    """One patch as the wheel remembers it; ``files`` are the paths it touches in the tree."""

    name: str
    sha256: str
    subject: str
    contract: list[str]
    depends_on: list[str]
    upstream_status: str
    files: list[str]


@dataclass(frozen=True)
class Manifest:
    """``k3-patches.json``.

    ``build`` is ``overlay`` or ``source``; ``pins`` are the archives used, by role.
    ``files`` maps each patched file in the wheel to the sha256 it must have (``None``: must not be there).
    ``provenance`` is kept in SLSA's terms.
    """

    version: str
    base: str
    commit: str
    build: str
    source: str
    pins: dict[str, Artifact]
    patches: list[PatchRecord]
    provenance: Provenance
    files: dict[str, str | None] = field(default_factory=dict)
    schema: int = SCHEMA

    def dump(self) -> bytes:
        names = [p.name for p in self.patches]
        provenance = self.provenance.to_slsa(self.version, self.build, self.pins, names)
        return (json.dumps(asdict(self) | {"provenance": provenance}, indent=1, sort_keys=True) + "\n").encode()

    def _texts(self) -> Iterator[object]:
        yield from (self.version, self.base, self.commit, self.build, self.source)
        for p in self.patches:
            yield from (p.name, p.sha256, p.subject, p.upstream_status, *p.contract, *p.depends_on, *p.files)
        for name, digest in self.files.items():
            yield from (name,) if digest is None else (name, digest)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what :meth:`dump` wrote.  ValueError says that it is something else."""
        try:
            raw: dict[str, Any] = json.loads(data)
            if raw["schema"] != SCHEMA:
                raise ValueError(f"schema {raw['schema']}, and this program reads {SCHEMA}")
            raw["pins"] = {role: Artifact(**pin) for role, pin in raw["pins"].items()}
            raw["patches"] = [PatchRecord(**p) for p in raw["patches"]]
            raw["provenance"] = Provenance.from_slsa(raw["provenance"])
            manifest = cls(**raw)
            if not all(isinstance(text, str) for text in manifest._texts()):
                raise TypeError("an entry is no text")
            return manifest
        except (LookupError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"not a {FILE} of this project: {e!r}") from None


def record(patch: Patch) -> PatchRecord:
    return PatchRecord(
        name=patch.name,
        sha256=patch.sha256,
        subject=patch.subject,
        contract=patch.contracts,
        depends_on=patch.depends_on,
        upstream_status=patch.upstream_status,
        files=patch.files,
    )


def version(base: Base, revision: int, patches: Sequence[Patch], whole: bool) -> str:
    """The wheel's version: ``0.27.1+k3.1``, or ``0.27.1+k3.1.partial`` when patches were left out."""
    return f"{base.release}+k3.{revision}" + ("" if whole and patches else ".partial")


def wheel_name(official: str, base: Base, new_version: str) -> str:
    """The official wheel's file name with another version; its tags stay."""
    return official.replace(f"-{base.release}-", f"-{new_version}-", 1)
