"""Read a series: the ``series`` file and the mails it names."""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from k3patches import messages
from k3patches.errors import UserError
from k3patches.messages import CONTRACT, DEPENDS_ON, UPSTREAM_STATUS, Message

SERIES_FILE = "series"
NAME = re.compile(r"(\d{4})-[A-Za-z0-9._-]+\.patch")


@dataclass(frozen=True)
class Patch:
    """One patch file: a mail that ``git am`` takes.

    ``files`` are the paths it touches, relative to the tree.
    """

    path: Path
    data: bytes
    author: str
    date: str
    subject: str
    body: str
    message: Message
    diff: PatchSet

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def number(self) -> str:
        return self.name[:4]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def files(self) -> list[str]:
        sides = (side for f in self.diff for side in (f.source_file, f.target_file) if side != "/dev/null")
        return list(dict.fromkeys(side.partition("/")[2] for side in sides))

    @property
    def preimages(self) -> dict[str, str]:
        """The blob of each file before the patch; zeros where the patch adds it."""
        index = re.compile(r"^index ([0-9a-f]+)\.\.", re.M)
        return {f.path: match[1] for f in self.diff if (match := index.search("".join(f.patch_info or [])))}

    @property
    def lines(self) -> tuple[int, int]:
        """How many lines it adds to code, and how many to tests."""
        tests = sum(f.added for f in self.diff if f.path.startswith("tests/"))
        return sum(f.added for f in self.diff) - tests, tests

    @property
    def contracts(self) -> list[str]:
        """Ids of the fixes that the patch is for."""
        return self.message.ids(CONTRACT)

    @property
    def depends_on(self) -> list[str]:
        """Ids of the fixes that must come before it."""
        return self.message.ids(DEPENDS_ON)

    @property
    def upstream_status(self) -> str:
        return "; ".join(self.message.values(UPSTREAM_STATUS))


def load(folder: Path) -> list[Patch]:
    """The patches of ``folder`` in the order of its series file.

    A name without its file, a file without its name, or a line that is no plain name is an error.
    """
    names = listed(folder)
    beside = {p.name for p in folder.glob("*.patch")}
    if missing := [n for n in names if n not in beside]:
        raise UserError(f"{folder / SERIES_FILE} names {missing[0]}, which is not there: restore it or drop the line")
    if extra := sorted(beside.difference(names)):
        raise UserError(f"{folder / extra[0]} is not in {SERIES_FILE}: add it there, or move the file away")
    return [read(folder / name) for name in names]


def listed(folder: Path) -> list[str]:
    """The names in the series file; blank lines and ``#`` comments group them."""
    path = folder / SERIES_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is no UTF-8 text ({e.reason}): restore it from git") from None
    except FileNotFoundError:
        raise UserError(f"{path} is missing: it lists the patches of {folder.name} in order") from None
    names = []
    for number, line in enumerate(lines, 1):
        name = line.split("#", 1)[0].strip()
        if not name:
            continue
        if not NAME.fullmatch(name):
            raise UserError(f"{path} line {number}: {name!r} is no NNNN-name.patch; options are not supported")
        if name in names:
            raise UserError(f"{path} line {number}: {name} is listed twice, drop one")
        names.append(name)
    return names


def read(path: Path) -> Patch:
    """Parse one patch file."""
    data = path.read_bytes()
    if b"\r\n" in data:
        raise UserError(f"{path} has CRLF line endings: convert it back with dos2unix, or restore it from git")
    try:
        mail = email.message_from_bytes(data, policy=email.policy.default)
        assert isinstance(mail, EmailMessage)
        author, date, subject = (str(mail[name] or "") for name in ("From", "Date", "Subject"))
        text = str(mail.get_content()) if author and subject else ""
    except (LookupError, ValueError, AttributeError):
        # Several parts, an unknown charset, or a header that email trips over.
        text = ""
    message, separator, rest = text.partition("\n---\n")
    start = rest.find("diff --git ")
    if not separator or start < 0:
        raise UserError(f"{path} is no mail with a diff: write it with git format-patch")
    try:
        diff = PatchSet(rest[start:])
    except UnidiffParseError as e:
        raise UserError(f"{path} was damaged or edited by hand: {e}; restore it, or export its commit again") from None
    subject = re.sub(r"^\[PATCH[^\]]*\] ", "", " ".join(subject.split()))
    return Patch(
        path=path,
        data=data,
        author=author,
        date=date,
        subject=subject,
        body=message,
        message=messages.parse(f"{subject}\n\n{message}"),
        diff=diff,
    )


def preimages(patches: Sequence[Patch]) -> dict[str, str]:
    """git's blob ids of the release's own files that a series changes, by path."""
    first: dict[str, str] = {}
    for patch in patches:
        for path, blob in patch.preimages.items():
            first.setdefault(path, blob)
    return {path: blob for path, blob in first.items() if blob.strip("0")}


def select(patches: list[Patch], until: str | None = None, skip: Iterable[str] = ()) -> list[Patch]:
    """The patches up to and with number ``until``, without the numbers in ``skip``.

    A patch left in whose ``Depends-On`` was left out is an error.
    """
    numbers = [p.number for p in patches]
    skip = set(skip)
    if unknown := sorted(({until} if until else set()).union(skip).difference(numbers)):
        raise UserError(f"no patch {unknown[0]} in this series: it has {', '.join(numbers) or 'none'}")
    end = numbers.index(until) + 1 if until else len(patches)
    kept = [p for p in patches[:end] if p.number not in skip]
    have: set[str] = set()
    for patch in kept:
        if missing := [d for d in patch.depends_on if d not in have]:
            raise UserError(f"{patch.name} depends on {missing[0]}, which is left out: leave out both, or neither")
        have.update(patch.contracts)
    return kept
