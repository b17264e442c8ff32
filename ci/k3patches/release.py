"""Pin a release: what the package index says of its files, and what its source says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pypi_simple import DistributionPackage

from k3patches import fetch, index
from k3patches.base import Artifact, Base
from k3patches.errors import UserError
from k3patches.source import Sdist

ARCHES = ("x86_64", "aarch64")


def pin(release: str, cache: Path, scratch: Path) -> Base:
    """What base.toml says of ``release``, asked of the configured package indexes.

    The sdist is downloaded into ``cache`` where that lacks it, and unpacked below ``scratch``,
    for the commit and the torch that it names.
    """
    files = {package.filename: package for package in _packages(release)}
    sdist = files.get(f"vllm-{release}.tar.gz")
    if not sdist:
        raise UserError(
            f"no configured package index has an sdist of vLLM {release}: name another release, check pip's "
            f"index-url, or rebase onto a git ref (--git) or a folder"
        )
    artifact = _artifact(sdist)
    wheels = {}
    for arch in ARCHES:
        # 0.28 has wheels for another manylinux or CUDA than the default one under names of their own.
        names = sorted(
            n for n in files if re.fullmatch(rf"vllm-{re.escape(release)}-[^+]*manylinux[^+]*_{arch}\.whl", n)
        )
        if names:
            wheels[arch] = _artifact(files[names[0]])
    if not wheels:
        raise UserError(f"the package index has no wheel of vLLM {release} for {' or '.join(ARCHES)}: wait for it")
    source = Sdist(fetch.fetch(artifact, cache), artifact.sha256)
    source.unpack(scratch)
    return Base(
        release=release,
        commit=_commit(scratch, release),
        released=_released(sdist),
        torch=_torch(scratch, release),
        sdist=artifact,
        wheels=wheels,
    )


def _packages(release: str) -> Iterator[DistributionPackage]:
    trouble = ""
    for answer in index.ask(fetch.PROJECT, index.pip_config()):
        trouble = answer.trouble or trouble
        found = [package for package in answer.packages if package.version == release]
        if found:
            yield from found
            return
    if trouble:
        raise UserError(
            f"cannot ask the package index for vLLM {release} ({trouble}): check the network and pip's index-url"
        )


def _artifact(package: DistributionPackage) -> Artifact:
    sha256 = package.digests.get("sha256")
    if not sha256 or package.size is None:
        what = "size" if sha256 else "sha256"
        raise UserError(
            f"the package index tells no {what} of {package.filename}: point pip's index-url at one that serves "
            f"the simple API's JSON"
        )
    return Artifact(package.filename, sha256, package.size)


def _released(package: DistributionPackage) -> datetime:
    if package.upload_time is None:
        raise UserError(
            f"the package index does not tell when {package.filename} was uploaded: point pip's index-url at one "
            f"that serves the simple API's JSON"
        )
    return package.upload_time.replace(microsecond=0)


def _commit(tree: Path, release: str) -> str:
    return _named(tree / "vllm" / "_version.py", r"^__commit_id__ = .*'g?([0-9a-f]{7,40})'", f"commit of {release}")


def _torch(tree: Path, release: str) -> str:
    return _named(tree / "requirements" / "cuda.txt", r"^torch\s*==\s*([^\s;#]+)", f"torch of {release}")


def _named(path: Path, pattern: str, what: str) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not (match := re.search(pattern, text, re.M)):
        raise UserError(f"{path.name} of the sdist does not name the {what}: write base.toml by hand, as other bases'")
    return match[1]
