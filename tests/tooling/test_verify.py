"""Each check of verify finds a wheel that is damaged in just that way."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import Content, digest, rewrite
from miniature import BUILT, INFO, OFFICIAL, VERSION, Mini, Run, require_error, require_ok

JSON = f"{INFO}/k3-patches.json"
METADATA = f"{INFO}/METADATA"
RECORD = f"{INFO}/RECORD"
WHEEL = f"{INFO}/WHEEL"


def replacing(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


def manifest(**entries: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **entries}).encode()


@pytest.mark.parametrize(
    ("changes", "record", "check", "where"),
    [
        # RECORD
        ({"vllm/kept.py": b"# other\n"}, False, "record", "vllm/kept.py"),
        ({"vllm/alpha.py": b"# other\n"}, False, "record", "vllm/alpha.py"),
        ({"vllm/_C.abi3.so": b"\x7fELF"}, False, "record", "vllm/_C.abi3.so"),
        ({"vllm/more.py": b"# more\n"}, False, "record", "vllm/more.py"),
        ({"vllm/kept.py": None}, False, "record", "vllm/kept.py"),
        ({RECORD: lambda r: r + f"vllm/ghost.py,{digest(b'')},0\n".encode()}, True, "record", "vllm/ghost.py"),
        ({RECORD: replacing(b"vllm/kept.py,sha256=", b"vllm/kept.py,sha256=AAAA")}, True, "record", "vllm/kept.py"),
        ({RECORD: replacing(digest(b"vllm\n").encode(), b"")}, True, "record", "top_level.txt"),
        # Tags
        ({WHEEL: replacing(b"manylinux_2_28_x86_64", b"linux_x86_64")}, True, "tags", "cp38-abi3-linux_x86_64"),
        ({WHEEL: replacing(b"cp38-abi3", b"cp39-abi3")}, True, "tags", "cp39-abi3"),
        # Version
        ({METADATA: replacing(VERSION.encode(), b"0.27.1")}, True, "version", "METADATA says 0.27.1"),
        ({"vllm/_version.py": replacing(VERSION.encode(), b"0.27.1")}, True, "version", "vllm/_version.py"),
        ({"vllm/_version.py": replacing(b"1, 'k3.7')", b"1)")}, True, "version", "vllm/_version.py"),
        ({JSON: manifest(version="0.27.1+k3.6")}, True, "version", "k3-patches.json says 0.27.1+k3.6"),
        # Patched files
        ({"vllm/alpha.py": b"# other\n"}, True, "patched", "vllm/alpha.py"),
        ({"vllm/new.py": None}, True, "patched", "vllm/new.py"),
        ({"vllm/gone.py": b"# again\n"}, True, "patched", "vllm/gone.py"),
        ({JSON: manifest(files={})}, True, "patched", "vllm/"),
        ({JSON: manifest(files={"vllm/kept.py": "0" * 64})}, True, "patched", "vllm/"),
        # Untouched files
        ({"vllm/kept.py": b"# other\n"}, True, "untouched", "vllm/kept.py"),
        ({"vllm/_C.abi3.so": b"\x7fELF"}, True, "untouched", "vllm/_C.abi3.so"),
        ({"vllm/_C.abi3.so": None}, True, "untouched", "vllm/_C.abi3.so"),
        ({"vllm/more.py": b"# more\n"}, True, "untouched", "vllm/more.py"),
        ({f"{INFO}/entry_points.txt": b"[console_scripts]\n"}, True, "untouched", "entry_points.txt"),
        ({METADATA: replacing(b">=3.10", b">=3.13")}, True, "untouched", "METADATA"),
        ({WHEEL: replacing(b"Purelib: false", b"Purelib: true")}, True, "untouched", "WHEEL"),
        ({"vllm/_version.py": replacing(b"g6e448d0ea", b"g00000000")}, True, "untouched", "vllm/_version.py"),
    ],
)
def test_each_check(built: Mini, run: Run, changes: dict[str, Content], record: bool, check: str, where: str) -> None:
    path = rewrite(built.wheel(), changes, record=record)
    require_error(run("verify", path), BUILT["x86_64"], f"check '{check}'", where, "build it again")


def test_the_same_rewriting_without_damage_passes(built: Mini, run: Run) -> None:
    require_ok(run("verify", rewrite(built.wheel(), {})))


def test_python_that_does_not_compile(built: Mini, run: Run) -> None:
    # Only where the official wheel has such a file, or the series makes one, do the other checks let it through.
    broken: dict[str, Content] = {"vllm/kept.py": b"def (:\n"}
    name = OFFICIAL["x86_64"]
    rewrite(built.files / name, broken)
    built.replace(name, (built.files / name).read_bytes())
    require_error(run("verify", rewrite(built.wheel(), broken)), "check 'compiles'", "vllm/kept.py")


@pytest.mark.parametrize(("name", "word"), [("vllm/kept.py", "vllm/kept.py"), (RECORD, RECORD)])
def test_a_member_that_stands_twice(built: Mini, run: Run, name: str, word: str) -> None:
    with zipfile.ZipFile(built.wheel(), "a") as wheel, pytest.warns(UserWarning, match="Duplicate"):
        wheel.writestr(name, wheel.read(name))
    require_error(run("verify", built.wheel()), "check 'record'", word)


@pytest.mark.parametrize("name", ["vllm/_version.py", METADATA, WHEEL])
def test_a_member_that_every_wheel_has(built: Mini, run: Run, name: str) -> None:
    require_error(run("verify", rewrite(built.wheel(), {name: None})), BUILT["x86_64"], name, "build it again")


def test_a_manifest_that_is_none(built: Mini, run: Run) -> None:
    require_error(run("verify", rewrite(built.wheel(), {JSON: b"{}"})), BUILT["x86_64"], "k3-patches.json")


@pytest.mark.parametrize("name", ["k3.whl", "vllm-nightly-py3-none-any.whl", "vllm-0.27.1+k3.7.zip"])
def test_a_file_whose_name_is_no_wheels(built: Mini, run: Run, name: str) -> None:
    path = built.wheel().rename(built.root / name)
    require_error(run("verify", path), name, "no intact wheel")


def test_a_wheel_under_another_name(built: Mini, run: Run) -> None:
    path = built.wheel().rename(built.root / BUILT["aarch64"])
    require_error(run("verify", path), "check 'tags'", "aarch64")


def test_a_wheel_of_another_part_of_the_series(built: Mini, run: Run) -> None:
    require_ok(run("apply", "--until", "0002"))
    require_error(run("verify", built.wheel()), "check 'patched'", "vllm/gamma.py")


def test_nothing_is_published_that_does_not_verify(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3patches.wheelfiles.stamped", lambda member, content, info, name: content)
    require_error(run("build", "--arch", "x86_64"), "check 'tags'", "do not use it")
    assert not mini.dist.exists()
    assert mini.leftovers() == []


def test_any_flipped_byte_is_found(built: Mini, run: Run, tmp_path: Path) -> None:
    content = built.wheel().read_bytes()
    path = tmp_path / BUILT["x86_64"]
    with zipfile.ZipFile(built.wheel()) as wheel:
        # Neither dates and permissions nor the unused fields of a zip are anybody's content.
        spots = [info.header_offset + 60 for info in wheel.infolist() if info.compress_size > 60]
    for spot in [*spots, len(content) - 5]:
        path.write_bytes(content[:spot] + bytes([content[spot] ^ 0x55]) + content[spot + 1 :])
        require_error(run("verify", path), BUILT["x86_64"])
