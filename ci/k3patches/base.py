"""base.toml: what is pinned of one upstream release."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
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
    ``torch`` is the version that the release pins.  The contracts of all bases run on one torch, that of the test
    environment, which is the default base's and not always this one.
    ``native`` and ``absent`` map a fix that has no patch here to the release since which that is so.
    """

    release: str
    commit: str
    released: datetime
    torch: str
    sdist: Artifact
    wheels: dict[str, Artifact]
    native: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

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
            native=_since(data.get("native", {})),
            absent=_since(data.get("absent", {})),
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


def render(base: Base) -> str:
    """The text of ``base``'s base.toml, which :func:`load` reads back."""
    released = base.released.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [f"# vLLM {base.release}, as pinned from the package index."]
    lines += [f'release = "{base.release}"', f'commit = "{base.commit}"', f"released = {released}"]
    lines += [f'torch = "{base.torch}"']
    for section, artifact in [("sdist", base.sdist), *((f"wheel.{arch}", pin) for arch, pin in base.wheels.items())]:
        lines += ["", f"[{section}]", f'filename = "{artifact.filename}"', f"size = {artifact.size}"]
        lines += [f'sha256 = "{artifact.sha256}"']
    for section, why, table in (
        ("native", "Fixes that this release has by itself, and the release since which it has been so.", base.native),
        ("absent", "Fixes whose feature does not exist here, and the release since which it does not.", base.absent),
    ):
        if table:
            lines += ["", f"# {why}", f"[{section}]", *(f'{fix} = "{since}"' for fix, since in sorted(table.items()))]
    return "\n".join(lines) + "\n"


def _since(table: dict[str, Any]) -> dict[str, str]:
    for fix, release in table.items():
        if not isinstance(release, str):
            raise TypeError(f'{fix} = "X.Y.Z" names a release')
    return dict(table)


def _artifact(entry: dict[str, Any]) -> Artifact:
    artifact = Artifact(entry["filename"], entry["sha256"], entry["size"])
    if not isinstance(artifact.filename, str) or not isinstance(artifact.size, int):
        raise TypeError("filename is a string and size a whole number of bytes")
    if not re.fullmatch(r"[0-9a-f]{64}", artifact.sha256):
        raise TypeError(f"sha256 of {artifact.filename} is not 64 hex digits")
    return artifact
