"""What a user can get wrong: one sentence that names the thing and the way out, and nothing is lost."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from k3patches import wheelfiles
from miniature import (
    AUTHOR,
    BUILT,
    HASHED,
    OFFICIAL,
    PATCHES,
    RELEASE,
    SDIST,
    SOURCE,
    Mini,
    Run,
    a_test,
    commit,
    require_error,
    require_ok,
    sdist_bytes,
)

WHEEL = OFFICIAL["x86_64"]
OLDER = "vllm-0.27.1+k3.6-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def older(mini: Mini) -> Iterator[None]:
    """A wheel of an earlier build in dist/, which has to survive whatever the test does."""
    mini.dist.mkdir()
    for name in (OLDER, BUILT["x86_64"]):
        (mini.dist / name).write_bytes(b"a good wheel of last week")
    yield
    for name in (OLDER, BUILT["x86_64"]):
        assert (mini.dist / name).read_bytes() == b"a good wheel of last week"
    assert sorted(p.name for p in mini.dist.iterdir()) == sorted([OLDER, BUILT["x86_64"]])


def refused(mini: Mini, run: Run, *words: str, args: tuple[str, ...] = ("build", "--arch", "x86_64")) -> str:
    """The sentence with which a build refuses; what was there before it is there after it, and no more."""
    before = mini.contents()
    error = require_error(run(*args), *words)
    after = mini.contents()
    assert {name: after.get(name) for name in before} == before
    assert mini.leftovers() == []
    return error


# Archives


def truncated_sdist() -> bytes:
    return sdist_bytes()[:-200]


def cut_inside_a_member() -> bytes:
    raw = gzip.decompress(sdist_bytes())
    return gzip.compress(raw[: raw.index(b"def d(")])


def wrong_checksum() -> bytes:
    data = bytearray(sdist_bytes())
    data[-6] ^= 0xFF
    return bytes(data)


def corrupt_stream() -> bytes:
    data = bytearray(sdist_bytes({**SOURCE, "vllm/noise.bin": os.urandom(30000).hex()}))
    data[len(data) // 2 : len(data) // 2 + 60] = b"\xff" * 60
    return bytes(data)


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize(
    "content",
    [truncated_sdist, cut_inside_a_member, wrong_checksum, corrupt_stream, lambda: b"", lambda: b"<html>no tar</html>"],
    ids=["truncated", "cut in a member", "wrong checksum", "corrupt stream", "empty", "html"],
)
def test_a_damaged_sdist_even_where_its_hash_is_pinned(mini: Mini, run: Run, content: object) -> None:
    mini.replace(SDIST, content())  # type: ignore[operator]
    refused(mini, run, str(mini.cache / SDIST), "damaged", "fetch it again")
    assert not mini.tree.exists()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b"") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    return sdist_bytes(extra=((info, data),))


TOP = f"vllm-{RELEASE}"


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize(
    "content",
    [
        member("../outside", data=b"x"),
        member(f"{TOP}/../../outside", data=b"x"),
        member(f"{TOP}/a/../../../outside", data=b"x"),
        member("/tmp/k3-outside/x", data=b"x"),
        member(f"{TOP}/.git/hooks/post-commit", data=b"#!/bin/sh\ntouch outside\n"),
        member(f"{TOP}/vllm/.git/config", data=b"x"),
        member(f"{TOP}/link", tarfile.SYMTYPE, "../../outside"),
        member(f"{TOP}/link", tarfile.SYMTYPE, "/etc"),
        member(f"{TOP}/link", tarfile.LNKTYPE, f"{TOP}/../../outside"),
        member(f"{TOP}/device", tarfile.CHRTYPE),
        member(f"{TOP}/pipe", tarfile.FIFOTYPE),
    ],
    ids=[
        "parent",
        "parent below the top",
        "parent deeper",
        "absolute",
        "hook",
        "repository below",
        "symlink up",
        "symlink absolute",
        "hard link up",
        "device",
        "pipe",
    ],
)
def test_an_archive_member_outside_its_target(mini: Mini, run: Run, content: bytes) -> None:
    (mini.build).mkdir()
    mini.replace(SDIST, content)
    refused(mini, run, str(mini.cache / SDIST))
    assert not mini.tree.exists()
    assert not list(mini.root.parent.rglob("outside"))
    assert not Path("/tmp/k3-outside").exists()


def test_writing_through_a_link_of_the_archive(mini: Mini, run: Run) -> None:
    link, through = tarfile.TarInfo(f"{TOP}/link"), tarfile.TarInfo(f"{TOP}/link/outside")
    link.type, link.linkname, through.size = tarfile.SYMTYPE, "..", 1
    mini.replace(SDIST, sdist_bytes(extra=((link, b""), (through, b"x"))))
    refused(mini, run, str(mini.cache / SDIST), "not safe")
    assert not list(mini.root.rglob("outside"))


def test_harmless_links_of_an_archive_are_unpacked(mini: Mini, run: Run) -> None:
    soft, hard = tarfile.TarInfo(f"{TOP}/docs/soft"), tarfile.TarInfo(f"{TOP}/docs/hard")
    soft.type, soft.linkname = tarfile.SYMTYPE, "../setup.py"
    hard.type, hard.linkname = tarfile.LNKTYPE, f"{TOP}/setup.py"
    mini.replace(SDIST, sdist_bytes(extra=((soft, b""), (hard, b""))))
    require_ok(run("apply"))
    assert (mini.tree / "docs" / "soft").readlink() == Path("../setup.py")
    assert (mini.tree / "docs" / "hard").read_text() == SOURCE["setup.py"]


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("damage", ["truncated", "empty", "no zip", "a member's bytes", "no RECORD", "RECORD is noise"])
def test_a_damaged_wheel_even_where_its_hash_is_pinned(mini: Mini, run: Run, damage: str) -> None:
    content = (mini.cache / WHEEL).read_bytes()
    if damage == "a member's bytes":
        with zipfile.ZipFile(mini.cache / WHEEL) as wheel:
            start = wheel.getinfo("vllm/_C.abi3.so").header_offset + 60
        content = content[:start] + b"\xff" * 40 + content[start + 40 :]
    elif damage in ("no RECORD", "RECORD is noise"):
        content = edited(content, {f"vllm-{RELEASE}.dist-info/RECORD": None if damage == "no RECORD" else b"\xff,\n,"})
    else:
        content = {"truncated": content[:-100], "empty": b"", "no zip": b"<html>"}[damage]
    mini.replace(WHEEL, content)
    refused(mini, run, str(mini.cache / WHEEL), "no intact wheel", "new copy")


def edited(wheel: bytes, changes: dict[str, bytes | None]) -> bytes:
    """The zip file with other members, and nothing done to make up for it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            content = changes.get(info.filename, old.read(info))
            if content is not None:
                new.writestr(info, content)
    return buffer.getvalue()


@pytest.mark.usefixtures("older")
def test_a_wheel_whose_python_is_not_the_sources(mini: Mini, run: Run) -> None:
    mini.replace(SDIST, sdist_bytes({**SOURCE, "vllm/kept.py": "# other\n"}))
    refused(mini, run, "vllm/kept.py", "differs", WHEEL, "--from-source")
    mini.replace(SDIST, sdist_bytes({**SOURCE, "vllm/more.py": "# more\n"}))
    require_error(run("build", "--arch", "x86_64"), "vllm/more.py", "is missing in", WHEEL)


# Series


@pytest.mark.usefixtures("older")
def test_a_series_that_names_a_missing_patch(mini: Mini, run: Run) -> None:
    (mini.series_dir / PATCHES[1]).unlink()
    refused(mini, run, PATCHES[1], "not there", "restore it")


@pytest.mark.usefixtures("older")
def test_a_patch_beside_the_series(mini: Mini, run: Run) -> None:
    (mini.series_dir / "0004-new.patch").write_text("x")
    refused(mini, run, "0004-new.patch", "not in series", "add it")


def test_a_series_that_is_missing(mini: Mini, run: Run) -> None:
    (mini.series_dir / "series").unlink()
    refused(mini, run, "series", "is missing")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (PATCHES[0], ("line 5", "listed twice")),
        ("0004-x.patch -p0", ("line 5", "options")),
        ("../0004-x.patch", ("line 5",)),
        ("fix.patch", ("line 5", "NNNN-name.patch")),
    ],
)
def test_a_line_that_a_series_must_not_have(mini: Mini, run: Run, line: str, words: tuple[str, ...]) -> None:
    with (mini.series_dir / "series").open("a") as f:
        f.write(f"{line}\n")
    refused(mini, run, *words)


def test_a_series_of_other_bytes_than_text(mini: Mini, run: Run) -> None:
    (mini.series_dir / "series").write_bytes(b"\xff\xfe0001\n")
    refused(mini, run, "series", "UTF-8")


def test_comments_and_blank_lines_group_a_series(mini: Mini, run: Run) -> None:
    names = "\n\n# group\n".join(PATCHES)
    (mini.series_dir / "series").write_text(f"# ümlaut\n{names}  # why\n", encoding="utf-8")
    require_ok(run("apply"))


@pytest.mark.usefixtures("older")
def test_a_patch_with_windows_line_ends(mini: Mini, run: Run) -> None:
    path = mini.series_dir / PATCHES[0]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    refused(mini, run, PATCHES[0], "CRLF", "dos2unix")


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+    return x + 100\n", ""),
        ("+    return x + 100\n", "+    return x + 100\n+    # one more\n"),
        ("-    return x + 99\n", "-    return x + 98\n"),
        (" def c(x: int) -> int:\n", ""),
    ],
    ids=["line dropped", "line added", "other old line", "context dropped"],
)
def test_a_patch_edited_by_hand(mini: Mini, run: Run, old: str, new: str) -> None:
    path = mini.series_dir / PATCHES[0]
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    refused(mini, run, PATCHES[0])
    assert not mini.tree.exists()


@pytest.mark.parametrize("content", [b"", b"no mail\n", b"From: a\nSubject: b\n\nno diff\n", b"\xff\x00\n"])
def test_a_patch_that_is_no_mail(mini: Mini, run: Run, content: bytes) -> None:
    (mini.series_dir / PATCHES[0]).write_bytes(content)
    refused(mini, run, PATCHES[0], "git format-patch")


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("path", ["csrc/x.cu", "setup.py", "vllm/new.cpp", "requirements/common.txt", "pyproject.toml"])
def test_what_an_overlay_cannot_hold(mini: Mini, run: Run, path: str) -> None:
    trailers = f"Contract: delta-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}\n"
    commit(mini.root / "upstream", {path: "# compiled\n"}, f"[Kernel] Compile it\n\nWhy.\n\n{trailers}")
    require_ok(run("refresh", mini.root / "upstream"))
    error = require_error(run("build", "--arch", "x86_64"), path, "--from-source")
    assert "compiled" in error
    assert mini.leftovers() == []


@pytest.mark.usefixtures("older")
def test_a_patch_of_what_every_build_stamps(mini: Mini, run: Run) -> None:
    trailers = f"Contract: delta-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}\n"
    upstream = mini.root / "upstream"
    commit(upstream, {"vllm/_version.py": "version = '1'\n"}, f"[Kernel] Be another version\n\nWhy.\n\n{trailers}")
    require_ok(run("refresh", upstream))
    require_error(run("build", "--arch", "x86_64"), "vllm/_version.py", "stamps")


def test_a_data_file_that_the_wheel_has_may_be_patched(mini: Mini, run: Run) -> None:
    trailers = f"Contract: delta-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}\n"
    files = {"vllm/data.json": '{"a": 2}\n', "docs/x.md": "x\n", "tests/test_delta.py": a_test("delta")}
    commit(mini.root / "upstream", files, f"[Model] Change data.json\n\nWhy.\n\n{trailers}")
    require_ok(run("refresh", mini.root / "upstream"))
    require_ok(run("build", "--arch", "x86_64"))
    with zipfile.ZipFile(mini.wheel()) as wheel:
        assert wheel.read("vllm/data.json") == b'{"a": 2}\n'
        assert "docs/x.md" not in wheel.namelist()


@pytest.mark.usefixtures("older")
def test_a_patch_that_breaks_pythons_syntax_is_caught_by_verify(mini: Mini, run: Run) -> None:
    trailers = f"Contract: delta-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}\n"
    commit(mini.root / "upstream", {"vllm/kept.py": "def (:\n"}, f"[Model] Break kept.py\n\nWhy.\n\n{trailers}")
    require_ok(run("refresh", mini.root / "upstream"))
    require_error(run("build", "--arch", "x86_64"), "compiles", "vllm/kept.py", BUILT["x86_64"])
    assert mini.leftovers() == []


# Configuration


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("release", ["0.99.0", "v0.27.1", "../v0.27.1", ""])
def test_an_unknown_base_lists_the_known(mini: Mini, run: Run, release: str) -> None:
    if release:
        refused(mini, run, release, "known bases are 0.27.1", args=("build", "--base", release))
    else:
        (mini.root / "VERSION").write_text("0.28.0+k3.1\n")
        refused(mini, run, "0.28.0", "known bases are 0.27.1")


def test_bases_are_listed_in_the_order_of_their_versions(mini: Mini, run: Run) -> None:
    for release in ("0.100.0", "0.9.2"):
        (mini.root / "patches" / f"v{release}").mkdir()
        (mini.root / "patches" / f"v{release}" / "base.toml").write_text("")
    refused(mini, run, "0.9.2, 0.27.1, 0.100.0", args=("build", "--base", "1"))
    (mini.root / "patches" / "vnext").mkdir()
    (mini.root / "patches" / "vnext" / "base.toml").write_text("")
    refused(mini, run, "no release", "next", args=("build",))


@pytest.mark.parametrize("text", ["", "0.27.1\n", "0.27.1+k3\n", "0.27.1+k3.x\n", "+k3.1", "\x00", "0.27.1+k3.1 -x\n"])
def test_a_version_file_of_nonsense(mini: Mini, run: Run, text: str) -> None:
    (mini.root / "VERSION").write_text(text)
    refused(mini, run, "VERSION", "0.27.1+k3.1")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('release = "', "release = ", ("not valid TOML",)),
        ('commit = "6e448d0ea"\n', "", ("commit",)),
        ("[sdist]", "[sourcedist]", ("sdist",)),
        ("[wheel.x86_64]", "[wheels.x86_64]", ("x86_64",)),
        ('release = "0.27.1"', 'release = "0.28.0"', ("0.28.0", "v0.27.1", "agree")),
        ('sha256 = "', 'sha256 = "x', ("64 hex digits",)),
        ("size = ", "size = 0.5\nolder_size = ", ("size",)),
        ("released = 2026-08-11T10:59:48Z", "released = 2026-08-11T10:59:48", ("released", "offset")),
        ("released = 2026-08-11T10:59:48Z", 'released = "yesterday"', ("released",)),
        ("\n[sdist]", '\nwheel = "none"\n\n[sdist]', ("base.toml",)),
    ],
)
def test_a_broken_base_toml(mini: Mini, run: Run, old: str, new: str, words: tuple[str, ...]) -> None:
    path = mini.series_dir / "base.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    refused(mini, run, *words)
    assert not mini.tree.exists()


def test_a_base_toml_whose_wheels_are_no_table(mini: Mini, run: Run) -> None:
    path = mini.series_dir / "base.toml"
    path.write_text("wheel = 5\n" + path.read_text().partition("\n[wheel")[0])
    refused(mini, run, "base.toml", "misspells")


def test_a_base_toml_of_other_bytes_than_text(mini: Mini, run: Run) -> None:
    (mini.series_dir / "base.toml").write_bytes(b"release = '\xff'\n")
    refused(mini, run, "base.toml", "not valid TOML")


def test_a_machine_without_a_pinned_wheel(mini: Mini, run: Run) -> None:
    path = mini.series_dir / "base.toml"
    path.write_text(path.read_text().partition("\n[wheel.aarch64]")[0])
    refused(mini, run, "aarch64", "choose x86_64", args=("build", "--arch", "aarch64"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("build", "--sdist", "a", "--source-dir", "b"), ("--sdist", "--source-dir", "one of them")),
        (("build", "--source-dir", "a", "--git", "b", "--ref", "c"), ("--source-dir", "--git")),
        (("fetch", "--sdist", "a", "--git", "b", "--ref", "c"), ("--sdist", "--git")),
        (("apply", "--git", "b"), ("--git", "--ref", "go together")),
        (("apply", "--ref", "b"), ("--git", "--ref", "go together")),
        (("build", "--from-source", "--wheel", "a.whl"), ("--from-source", "--wheel")),
        (("wheel", "--no-isolation"), ("--no-isolation", "--from-source")),
        (("build", "--arch", "riscv"), ("riscv",)),
        (("status", "--python", "a", "b.whl"), ("--python",)),
        (("buidl",), ("buidl",)),
        (("build", "--untill", "0001"), ("--untill",)),
    ],
)
def test_options_that_contradict_each_other(
    mini: Mini, run: Run, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(mini, run, *words, args=args)
    assert not mini.dist.exists()


def test_the_wheel_stage_wants_a_tree(mini: Mini, run: Run) -> None:
    refused(mini, run, "run apply", args=("wheel",))
    refused(mini, run, "run apply", args=("verify",))


def test_verify_wants_a_wheel_of_this_project(built: Mini, run: Run) -> None:
    refused(built, run, "nowhere.whl is not there", args=("verify", "nowhere.whl"))
    refused(built, run, WHEEL, "not built by this project", args=("verify", str(built.files / WHEEL)))


def test_no_git(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refused(mini, run, "git is not installed", "package manager")


def test_an_interpreter_that_is_none(mini: Mini, run: Run) -> None:
    args = ("build", "--from-source", "--no-isolation", "--python", "/nowhere/python")
    require_error(run(*args), "/nowhere/python", "--python")
    assert mini.leftovers() == []


def test_an_output_folder_that_is_a_file(mini: Mini, run: Run) -> None:
    (mini.root / "plain").write_text("mine")
    require_error(run("build", "--arch", "x86_64", "--out", mini.root / "plain"), "plain", "--out")
    assert (mini.root / "plain").read_text() == "mine"
    assert mini.leftovers() == []


def test_an_output_folder_with_older_wheels(mini: Mini, run: Run) -> None:
    mini.dist.mkdir()
    for name in (OLDER, BUILT["x86_64"], "notes.txt"):
        (mini.dist / name).write_bytes(b"old")
    require_ok(run("build", "--arch", "x86_64"))
    assert sorted(p.name for p in mini.dist.iterdir()) == sorted(
        [OLDER, BUILT["x86_64"], HASHED["x86_64"], "notes.txt"]
    )
    assert (mini.dist / OLDER).read_bytes() == b"old"
    require_ok(run("verify", "--arch", "x86_64"))


# The machine's limits


@pytest.mark.usefixtures("older")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_no_space_left_while_the_wheel_is_written(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ok(run("apply"))
    write = wheelfiles.WheelFile.writestr
    written = []

    def fill_up(self: zipfile.ZipFile, *args: object, **kwargs: object) -> None:
        written.append(1)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *args, **kwargs)

    monkeypatch.setattr(wheelfiles.WheelFile, "writestr", fill_up)
    refused(mini, run, "no space left", "free some", "run it again", args=("wheel", "--arch", "x86_64"))
    assert len(written) >= 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, which takes the rights of root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "k3-test", str(disk)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("free", [0, 8, 30, 60, 120, 200])
def test_a_full_disk_below_the_build_folder(mini: Mini, run: Run, small_disk: Path, free: int) -> None:
    mini.dist.mkdir()
    (mini.dist / OLDER).write_bytes(b"old")
    mini.build.symlink_to(small_disk)
    ballast(small_disk, free)
    before = mini.contents()
    error = refused(mini, run, "free some", "run it again")
    assert "no space left" in error.lower()
    assert mini.contents() == before
    (small_disk / "ballast").unlink()
    require_ok(run("build", "--arch", "x86_64"))


def test_a_disk_that_is_full_when_the_wheel_is_written(mini: Mini, small_disk: Path) -> None:
    mini.build.symlink_to(small_disk)
    require_ok(mini.outside("apply"))
    before = mini.contents()
    ballast(small_disk, 4)
    require_error(mini.outside("wheel", "--arch", "x86_64"), "no space left", "run it again")
    (small_disk / "ballast").unlink()
    assert mini.contents() == before
    assert mini.leftovers() == []
    require_ok(mini.outside("wheel", "--arch", "x86_64"))


@pytest.mark.parametrize("free", [0, 4])
def test_a_full_disk_below_the_output_folder(mini: Mini, run: Run, small_disk: Path, free: int) -> None:
    (small_disk / OLDER).write_bytes(b"old")
    ballast(small_disk, free)
    require_error(run("build", "--arch", "x86_64", "--out", small_disk), str(small_disk), "--out")
    assert sorted(p.name for p in small_disk.iterdir()) == sorted(["ballast", OLDER])
    assert mini.leftovers() == []


def ballast(disk: Path, free_kib: int) -> None:
    """Fill ``disk`` until only so much is left."""
    left = os.statvfs(disk)
    (disk / "ballast").write_bytes(b"x" * (left.f_bavail * left.f_frsize - free_kib * 1024))
