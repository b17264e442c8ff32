"""Downloads: from a well and from an ill package index, with every state of the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from miniature import OFFICIAL, SDIST, Mini, Run, require_error, require_ok, sha256
from package_index import PackageIndex

WHEEL = OFFICIAL["x86_64"]


def cached(mini: Mini) -> list[str]:
    """Everything in the cache but the locks, which are empty."""
    return sorted(p.name for p in mini.cache.rglob("*") if not p.name.endswith(".lock")) if mini.cache.exists() else []


def test_fetch_follows_redirects_and_says_where_the_files_are(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    result = require_ok(run("fetch", "--arch", "x86_64"))
    assert result.out.splitlines() == [str(mini.cache / SDIST), str(mini.cache / WHEEL)]
    assert (mini.cache / SDIST).read_bytes() == (mini.files / SDIST).read_bytes()
    assert f"/moved/{SDIST}" in index.asked
    assert cached(mini) == sorted([SDIST, WHEEL])


def test_fetch_is_quiet_where_nobody_watches(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    result = require_ok(run("fetch", "--arch", "x86_64"))
    assert result.err.splitlines() == [f"fetching {SDIST} (0 MiB)", f"fetching {WHEEL} (0 MiB)"]


def test_a_file_in_the_cache_is_not_asked_for(mini: Mini, run: Run, index: PackageIndex) -> None:
    result = require_ok(run("fetch", "--arch", "x86_64"))
    assert (index.asked, result.err) == ([], "")
    (mini.cache / WHEEL).unlink()
    require_ok(run("fetch", "--arch", "x86_64"))
    assert index.asked == ["/simple/vllm/", f"/moved/{WHEEL}", f"/files/{WHEEL}"]


@pytest.mark.parametrize("variable", ["PIP_PROXY", "http_proxy"])
def test_a_proxy_fetches_from_an_index_that_only_it_reaches(
    mini: Mini, run: Run, index: PackageIndex, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    mini.cold()
    monkeypatch.setenv("PIP_INDEX_URL", "http://mirror.invalid/simple")
    monkeypatch.setenv(variable, index.url.removesuffix("/simple"))
    require_ok(run("fetch", "--arch", "x86_64"))
    assert index.asked[0] == "http://mirror.invalid/simple/vllm/"
    assert cached(mini) == sorted([SDIST, WHEEL])


@pytest.mark.parametrize("trouble", ["cut", "wrong", "missing"])
def test_a_download_that_fails_for_a_time_is_tried_again(
    mini: Mini, run: Run, index: PackageIndex, trouble: str
) -> None:
    mini.cold()
    index.plans[SDIST] = [trouble, trouble, "well"]
    require_ok(run("fetch", "--arch", "x86_64"))
    assert index.asked.count(f"/files/{SDIST}") == 3
    assert cached(mini) == sorted([SDIST, WHEEL])


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("cut", ("ChunkedEncodingError", "try again")),
        ("missing", ("HTTP status 404",)),
        ("wrong", ("another", "pinned", "index-url")),
    ],
)
def test_a_download_that_always_fails_leaves_nothing(
    mini: Mini, run: Run, index: PackageIndex, trouble: str, words: tuple[str, ...]
) -> None:
    (mini.cache / WHEEL).unlink()
    index.plans[WHEEL] = [trouble]
    require_error(run("fetch", "--arch", "x86_64"), WHEEL, "--wheel", *words)
    assert index.asked.count(f"/files/{WHEEL}") == 4
    assert cached(mini) == [OFFICIAL["aarch64"], SDIST]


def test_what_the_index_serves_wrong_is_named_with_both_hashes(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    index.plans[SDIST] = ["wrong"]
    pinned = sha256(mini.files / SDIST)
    error = require_error(run("fetch"), pinned)
    (mini.root / "served").write_bytes((mini.files / SDIST).read_bytes()[::-1])
    assert sha256(mini.root / "served") in error


def test_an_index_without_the_file(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    (mini.files / SDIST).unlink()
    require_error(run("fetch"), "no configured package index has", SDIST)
    assert cached(mini) == []


@pytest.mark.parametrize("trouble", ["status", "type"])
def test_an_index_that_is_none(mini: Mini, run: Run, index: PackageIndex, trouble: str) -> None:
    mini.cold()
    if trouble == "status":
        index.page_status = 503
    else:
        index.page_type = "image/png"
    require_error(run("fetch"), "cannot ask the package index", "127.0.0.1", SDIST, "--sdist")
    assert cached(mini) == []


def test_the_second_index_is_asked_where_the_first_is_down(
    mini: Mini, run: Run, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini.cold()
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    require_ok(run("fetch", "--arch", "x86_64"))


def test_no_network_and_a_warm_cache(mini: Mini, run: Run) -> None:
    require_ok(run("build", "--arch", "x86_64"))
    assert mini.wheel().is_file()


def test_no_network_and_a_cold_cache(mini: Mini, run: Run) -> None:
    mini.cold()
    require_error(run("build"), "cannot ask the package index", SDIST, "check the network", "--sdist")
    assert not mini.dist.exists()
    assert not mini.tree.exists()
    assert cached(mini) == []


def test_given_files_need_neither_cache_nor_network(mini: Mini, run: Run) -> None:
    mini.cold()
    files = mini.files / SDIST, mini.files / WHEEL
    require_ok(run("build", "--arch", "x86_64", "--sdist", files[0], "--wheel", files[1]))
    assert mini.wheel().is_file()
    assert not mini.cache.exists()


def test_a_cache_of_another_name(mini: Mini, run: Run, index: PackageIndex, tmp_path: Path) -> None:
    mini.cold()
    elsewhere = tmp_path / "a" / "b"
    require_ok(run("fetch", "--arch", "x86_64", "--cache", elsewhere))
    assert (elsewhere / SDIST).is_file()
    assert not mini.cache.exists()


def test_a_cache_that_cannot_be_made(mini: Mini, run: Run, index: PackageIndex) -> None:
    (mini.root / "plain").write_text("a file")
    require_error(run("fetch", "--cache", mini.root / "plain" / "below"), "plain/below", "--cache")


@pytest.fixture
def read_only(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attempt to lock, and so to write, in the cache fail as a read-only file system does."""

    acquire = FileLock.acquire

    def refuse(self: FileLock, *args: Any, **kwargs: Any) -> Any:
        if Path(self.lock_file).is_relative_to(mini.cache):
            raise OSError(30, "Read-only file system", str(mini.cache))
        return acquire(self, *args, **kwargs)

    monkeypatch.setattr("k3patches.fetch.FileLock.acquire", refuse)


@pytest.mark.usefixtures("read_only")
def test_a_read_only_cache_that_has_the_files_serves(mini: Mini, run: Run) -> None:
    require_ok(run("fetch", "--arch", "x86_64"))


@pytest.mark.usefixtures("read_only")
def test_a_read_only_cache_that_lacks_a_file(mini: Mini, run: Run, index: PackageIndex) -> None:
    (mini.cache / WHEEL).unlink()
    error = require_error(run("fetch", "--arch", "x86_64"), str(mini.cache), "Read-only file system", "--cache")
    assert "Errno" not in error


def test_a_damaged_file_in_the_cache_says_both_hashes(mini: Mini, run: Run) -> None:
    pinned = sha256(mini.cache / WHEEL)
    mini.replace(WHEEL, (mini.cache / WHEEL).read_bytes()[:-100], pinned=False)
    require_error(run("build", "--arch", "x86_64"), pinned, sha256(mini.cache / WHEEL), "delete it")
    assert not mini.dist.exists()
    assert (mini.cache / WHEEL).is_file()


@pytest.mark.parametrize(("option", "name"), [("--sdist", SDIST), ("--wheel", WHEEL)])
def test_a_given_file_of_another_content_says_both_hashes(mini: Mini, run: Run, option: str, name: str) -> None:
    folder = Path(shutil.copytree(mini.files, mini.root / "given"))
    (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    error = require_error(
        run("build", "--arch", "x86_64", option, folder / name), sha256(folder / name), sha256(mini.files / name)
    )
    assert "intact copy" in error
    assert not mini.tree.exists()
    assert not mini.dist.exists()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--wheel", "vllm-0.28.0-cp38-abi3-manylinux_2_28_x86_64.whl"),
        ("--wheel", OFFICIAL["aarch64"]),
        ("--sdist", "vllm-0.28.0.tar.gz"),
    ],
)
def test_a_given_file_of_another_name(mini: Mini, run: Run, option: str, name: str) -> None:
    path = mini.root / name
    shutil.copy2(mini.files / WHEEL, path)
    require_error(run("build", "--arch", "x86_64", option, path), name, WHEEL if option == "--wheel" else SDIST)
    assert not mini.dist.exists()


@pytest.mark.parametrize("option", ["--sdist", "--wheel"])
def test_a_given_file_that_is_not_there(mini: Mini, run: Run, option: str) -> None:
    require_error(run("build", option, mini.root / "nothing"), "nothing is not there")


def test_fetch_takes_the_source_where_build_does(mini: Mini, run: Run) -> None:
    (mini.cache / SDIST).unlink()
    result = require_ok(run("fetch", "--arch", "x86_64", "--git", f"file://{mini.root}/upstream", "--ref", "main"))
    assert result.out.splitlines()[1] == str(mini.cache / WHEEL)


def test_a_password_of_the_index_stays_there(mini: Mini) -> None:
    from k3patches.index import _credentials

    index = "https://me:secret@index.example/simple"
    assert _credentials(index, "https://index.example/files/a.whl") == ("me", "secret")
    assert _credentials(index, "https://files.example/a.whl") is None
    assert _credentials(index, "https://index.example:8443/a.whl") is None
    assert _credentials("https://index.example/simple", "https://index.example/a.whl") is None
