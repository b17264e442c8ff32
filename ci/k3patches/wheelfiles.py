"""Write one wheel out of another: some files replaced, a new version, a new RECORD."""

from __future__ import annotations

import csv
import errno
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email import message_from_bytes
from pathlib import Path

from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelError, WheelFile

from k3patches.errors import UserError

VERSION_FILE = "vllm/_version.py"
DAMAGE = (WheelError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError)


@contextmanager
def opened(path: Path) -> Iterator[WheelFile]:
    """An existing wheel, open for reading; damage found inside the block becomes a user's error.

    Each member read to its end is checked against RECORD.
    """
    try:
        parse_wheel_filename(path.name)
        wheel = WheelFile(path)
    except (*DAMAGE, ValueError, csv.Error, OSError) as e:
        # ValueError and csv.Error come of a RECORD that is none, EINVAL of an offset outside the file.
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise
        raise UserError(f"{path} is no intact wheel ({e}): get a new copy") from None
    with wheel:
        try:
            yield wheel
        except DAMAGE as e:
            raise UserError(f"{path} is no intact wheel ({e}): get a new copy") from None


def rewrite(
    old: Path, new: Path, replaced: Mapping[str, bytes | None], added_info: Mapping[str, bytes], epoch: int
) -> None:
    """Write wheel ``new`` with the content of ``old``.

    ``replaced`` maps member names to new content, or to ``None`` to leave the member out; names that
    ``old`` lacks are added.  ``added_info`` are files for the dist-info folder.  Version and tags of
    the metadata follow ``new``'s file name.  The same input gives the same bytes: members keep their
    dates, the new ones are dated ``epoch`` (seconds since 1970, UTC).
    """
    with opened(old) as source, _dated(epoch), _created(new) as target:
        info = source.dist_info_path
        pending = dict(replaced)
        for member in source.infolist():
            if member.filename in pending:
                content = pending.pop(member.filename)
            elif member.filename == source.record_path or member.is_dir():
                continue
            else:
                content = source.read(member)
            if content is None:
                continue
            content = stamped(member.filename, content, info, new.name)
            target.writestr(_like(member, _moved(member.filename, info, target.dist_info_path)), content)
        model = source.getinfo(f"{info}/METADATA")
        pending |= {f"{target.dist_info_path}/{name}": content for name, content in added_info.items()}
        for name, content in sorted(pending.items()):
            if content is not None:
                target.writestr(_like(model, name), content)


def stamped(member: str, content: bytes, info: str, wheel_name: str) -> bytes:
    """A wheel's ``member`` with the version and the tags that ``wheel_name`` says; ``info`` is the dist-info folder."""
    _, version, _, tags = parse_wheel_filename(wheel_name)
    if member == VERSION_FILE:
        return set_version_file(content, str(version))
    if member == f"{info}/METADATA":
        return _set_header(content, "Version", [str(version)])
    if member == f"{info}/WHEEL":
        return _set_header(content, "Tag", sorted(map(str, tags)))
    return content


def metadata(old: Path, wheel_name: str) -> bytes:
    """METADATA of the wheel that :func:`rewrite` makes of ``old`` under the name ``wheel_name``."""
    with opened(old) as source:
        member = f"{source.dist_info_path}/METADATA"
        return stamped(member, source.read(member), source.dist_info_path, wheel_name)


def set_version_file(content: bytes, version: str) -> bytes:
    """``vllm/_version.py`` with another version, as setuptools-scm would have written it."""
    numbers = [part if part.isdigit() else repr(part) for part in re.split(r"[.]", version.split("+")[0])]
    local = version.partition("+")[2]
    parts = ", ".join(numbers + ([repr(local)] if local else []))
    text, changed = re.subn(
        r"(?m)^(__version__ = version = ).*$", rf"\g<1>{version!r}", content.decode(errors="replace")
    )
    text, also = re.subn(r"(?m)^(__version_tuple__ = version_tuple = ).*$", rf"\g<1>({parts})", text)
    if (changed, also) != (1, 1):
        raise UserError(f"{VERSION_FILE} is not written as setuptools-scm writes it: the version cannot be stamped")
    return text.encode(errors="surrogateescape")


def _set_header(content: bytes, name: str, values: list[str]) -> bytes:
    head, blank, body = content.partition(b"\n\n")
    # Not splitlines, which takes also what is no line's end in a mail's header.
    lines = head.decode().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
    kept = [line for line in lines if not line.startswith(f"{name}: ")]
    kept[at:at] = [f"{name}: {value}" for value in values]
    result = "\n".join(kept).encode() + (blank + body if blank else b"\n")
    assert message_from_bytes(result).get_all(name) == values
    return result


def _moved(name: str, old_info: str, new_info: str) -> str:
    return new_info + name[len(old_info) :] if name.startswith(f"{old_info}/") else name


def _like(member: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    new = zipfile.ZipInfo(name, member.date_time)
    new.external_attr = member.external_attr
    new.create_system = member.create_system
    new.compress_type = zipfile.ZIP_DEFLATED
    return new


@contextmanager
def _created(path: Path) -> Iterator[WheelFile]:
    wheel = WheelFile(path, "w")
    try:
        with wheel:
            yield wheel
    except BaseException:
        # Closing writes RECORD.  Where that fails, the object's end would try it again, and print a traceback.
        unfinished, wheel.fp = wheel.fp, None
        if unfinished:
            with suppress(OSError):
                unfinished.close()
        raise


@contextmanager
def _dated(epoch: int) -> Iterator[None]:
    # The only way to tell WheelFile which date its RECORD gets.
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before
