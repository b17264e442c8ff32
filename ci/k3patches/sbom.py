"""The software bill of materials that a wheel carries in its dist-info (PEP 770), in CycloneDX's JSON.

It follows from the wheel's manifest and METADATA alone, so that the same wheel has the same one, and whoever has a
wheel can tell whether its bill is what it should be.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from email import message_from_bytes
from hashlib import sha256

from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Component,
    ComponentScope,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.issue import IssueClassification, IssueType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k3patches.base import Artifact
from k3patches.manifest import Manifest, PatchRecord

# Within the dist-info folder.
FILE = "sboms/k3-patches.cdx.json"
PREFIX = "k3-patches"


def render(manifest: Manifest, metadata: bytes) -> bytes:
    """The bill of the wheel that has this manifest and this METADATA."""
    headers = message_from_bytes(metadata)
    wheel = _wheel(manifest, str(headers.get("License-Expression") or ""))
    needed = list(_required(headers.get_all("Requires-Dist") or []))
    patches = [_patch_file(manifest, p) for p in manifest.patches]
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, sha256(manifest.dump() + metadata).hexdigest()),
        metadata=BomMetaData(
            component=wheel,
            tools=ToolRepository(
                components=[
                    Component(type=ComponentType.APPLICATION, name=name, version=version, bom_ref=f"tool:{name}")
                    for name, version in manifest.provenance.tools.items()
                ]
            ),
            timestamp=datetime.fromtimestamp(manifest.provenance.epoch, timezone.utc),
            properties=[
                Property(name=f"{PREFIX}:built-by", value=manifest.provenance.told),
                Property(name=f"{PREFIX}:build", value=manifest.build),
            ],
        ),
        components=[*needed, *patches],
    )
    bom.register_dependency(wheel, [*needed, *patches])
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _wheel(manifest: Manifest, license_expression: str) -> Component:
    return Component(
        name="vllm",
        version=manifest.version,
        type=ComponentType.APPLICATION,
        purl=PackageURL("pypi", None, "vllm", manifest.version),
        bom_ref=f"vllm@{manifest.version}",
        licenses=[LicenseExpression(license_expression)] if license_expression else [],
        pedigree=Pedigree(
            ancestors=[_archive(manifest, role, pin) for role, pin in manifest.pins.items()],
            patches=[_pedigree(manifest, p) for p in manifest.patches],
        ),
    )


def _archive(manifest: Manifest, role: str, pin: Artifact) -> Component:
    purl = PackageURL("pypi", None, "vllm", manifest.base, {"file_name": pin.filename})
    return Component(
        name="vllm",
        version=manifest.base,
        type=ComponentType.APPLICATION,
        purl=purl,
        bom_ref=pin.filename,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=pin.sha256)],
        properties=[
            Property(name=f"{PREFIX}:role", value=role),
            Property(name=f"{PREFIX}:commit", value=manifest.commit),
        ],
    )


def _path(manifest: Manifest, patch: PatchRecord) -> str:
    return f"patches/v{manifest.base}/{patch.name}"


def _pedigree(manifest: Manifest, patch: PatchRecord) -> Patch:
    return Patch(
        type=PatchClassification.UNOFFICIAL,
        diff=Diff(url=XsUri(_path(manifest, patch))),
        resolves=[IssueType(type=IssueClassification.DEFECT, id=fix, name=patch.subject) for fix in patch.contract],
    )


def _patch_file(manifest: Manifest, patch: PatchRecord) -> Component:
    """The patch once more, since a pedigree has no place for a checksum."""
    return Component(
        name=_path(manifest, patch),
        type=ComponentType.FILE,
        bom_ref=_path(manifest, patch),
        description=patch.subject,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=patch.sha256)],
        properties=[
            *(Property(name=f"{PREFIX}:fix", value=fix) for fix in patch.contract),
            Property(name=f"{PREFIX}:upstream-status", value=patch.upstream_status),
        ],
    )


def _required(lines: Iterable[str]) -> Iterator[Component]:
    """The distributions that the wheel asks for; a version only where it pins one."""
    by_name: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        by_name.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    for name, asked in by_name.items():
        pinned = {s.version for r in asked for s in r.specifier if s.operator == "==" and not s.version.endswith(".*")}
        version = pinned.pop() if len(pinned) == 1 else None
        always = any("extra" not in str(r.marker or "") for r in asked)
        yield Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", None, name, version),
            bom_ref=f"requires:{name}",
            scope=ComponentScope.REQUIRED if always else ComponentScope.OPTIONAL,
            properties=[Property(name=f"{PREFIX}:requires-dist", value=str(r)) for r in asked],
        )
