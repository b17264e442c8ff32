"""base.toml: what is pinned of one upstream release."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from k3patches.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "base.toml"


@dataclass(frozen=True)
class Artifact:
    """A file of the release, as the package index serves it.  ``size`` is in bytes."""

    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Base:
    """An upstream release that has a series.

    ``released`` dates everything that a build makes, so that nothing depends on today.
    ``wheels`` is keyed by machine (``x86_64``, ``aarch64``).
    ``torch`` is the version that the release pins, and that the contracts run on.
    """

    release: str
    commit: str
    released: datetime
    torch: str
    sdist: Artifact
    wheels: dict[str, Artifact]

    @property
    def epoch(self) -> int:
        """``released`` as seconds since 1970, UTC."""
        return int(self.released.timestamp())

    def wheel(self, arch: str) -> Artifact:
        if arch not in self.wheels:
            raise UserError(f"vLLM {self.release} has no pinned wheel for {arch}: choose {' or '.join(self.wheels)}")
        return self.wheels[arch]


def load(folder: Path) -> Base:
    """Read ``folder/base.toml``."""
    path = folder / FILE
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        base = Base(
            release=data["release"],
            commit=data["commit"],
            released=data["released"],
            torch=data["torch"],
            sdist=_artifact(data["sdist"]),
            wheels={arch: _artifact(entry) for arch, entry in data["wheel"].items()},
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid TOML: {e}") from None
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} lacks or misspells an entry: {e}; compare it with another base's") from None
    if base.release != folder.name.removeprefix("v"):
        raise UserError(f"{path} says release {base.release}, but its folder is {folder.name}: make them agree")
    if not isinstance(base.released, datetime) or base.released.tzinfo is None:
        raise UserError(f"{path}: released must be a date and time with its offset, such as 2026-08-11T09:02:12Z")
    return base


def _artifact(entry: dict[str, Any]) -> Artifact:
    artifact = Artifact(entry["filename"], entry["sha256"], entry["size"])
    if not isinstance(artifact.filename, str) or not isinstance(artifact.size, int):
        raise TypeError("filename is a string and size a whole number of bytes")
    if not re.fullmatch(r"[0-9a-f]{64}", artifact.sha256):
        raise TypeError(f"sha256 of {artifact.filename} is not 64 hex digits")
    return artifact
