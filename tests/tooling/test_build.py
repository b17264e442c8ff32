"""The main job from end to end: what the wheel holds, and that the same checkout gives the same bytes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from filelock import FileLock
from installer.sources import WheelFile as InstallerWheel
from miniature import (
    BILL,
    BUILT,
    HASHED,
    INFO,
    OFFICIAL,
    PARTIAL,
    PATCHES,
    RELEASE,
    SDIST,
    SOURCE,
    VERSION,
    Mini,
    Run,
    git,
    require_error,
    require_ok,
    sha256,
    write_files,
)

OLD_INFO = f"vllm-{RELEASE}.dist-info"


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def test_build_prints_the_wheel_and_nothing_else(mini: Mini, run: Run) -> None:
    result = require_ok(run("build", "--arch", "x86_64"))
    assert result.out.splitlines() == [str(mini.wheel())]
    assert sorted(p.name for p in mini.dist.iterdir()) == [BUILT["x86_64"], HASHED["x86_64"]]
    assert f"sha256 {sha256(mini.wheel())}" in result.err
    assert mini.leftovers() == []


def test_the_wheel_says_its_version_everywhere(built: Mini) -> None:
    files = members(built.wheel())
    metadata = files[f"{INFO}/METADATA"].decode()
    assert f"\nVersion: {VERSION}\n" in metadata
    assert metadata.endswith("\n\n# vLLM\n\nVersion: not a header\n")
    namespace: dict[str, object] = {}
    exec(files["vllm/_version.py"], namespace)
    assert namespace["__version__"] == namespace["version"] == VERSION
    assert namespace["__version_tuple__"] == namespace["version_tuple"] == (0, 27, 1, "k3.7")
    assert namespace["commit_id"] == "g6e448d0ea"


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_tags_are_kept_and_those_inside_follow_the_name(mini: Mini, run: Run, arch: str) -> None:
    require_ok(run("build", "--arch", arch))
    wheel = members(mini.wheel(arch))[f"{INFO}/WHEEL"].decode()
    assert [line for line in wheel.splitlines() if line.startswith("Tag")] == [f"Tag: cp38-abi3-manylinux_2_28_{arch}"]
    assert "Root-Is-Purelib: false\n" in wheel
    # The name says which official wheel to compare it with.
    require_ok(run("verify", mini.wheel(arch)))


def test_patched_files_are_in_and_all_others_are_the_official_ones(built: Mini) -> None:
    new, old = members(built.wheel()), members(built.files / OFFICIAL["x86_64"])
    assert b"x + 100" in new["vllm/alpha.py"]
    assert b"x - 98" in new["vllm/gamma.py"]
    assert b"NEW = True" in new["vllm/new.py"]
    assert "vllm/gone.py" not in new
    assert not [name for name in new if name.startswith("tests/")]
    stamped = {"vllm/_version.py", f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD"}
    moved = {name.replace(OLD_INFO, INFO): content for name, content in old.items()}
    same = moved.keys() - stamped - {"vllm/alpha.py", "vllm/gamma.py", "vllm/gone.py"}
    assert {name: new[name] for name in same} == {name: moved[name] for name in same}
    ours = {f"{INFO}/k3-patches.json", BILL}
    assert new.keys() - same - stamped == {"vllm/alpha.py", "vllm/gamma.py", "vllm/new.py", *ours}
    with zipfile.ZipFile(built.wheel()) as wheel:
        assert wheel.getinfo("vllm/_C.abi3.so").external_attr >> 16 == 0o100755
        assert wheel.getinfo("vllm/new.py").external_attr >> 16 == 0o100644


def test_the_manifest_says_what_the_wheel_was_made_of(built: Mini) -> None:
    files = members(built.wheel())
    manifest = json.loads(files[f"{INFO}/k3-patches.json"])
    assert (manifest["version"], manifest["base"], manifest["build"]) == (VERSION, RELEASE, "overlay")
    assert manifest["commit"] == "6e448d0ea"
    assert manifest["pins"] == {
        role: {"filename": name, "sha256": sha256(built.files / name), "size": (built.files / name).stat().st_size}
        for role, name in (("sdist", SDIST), ("wheel", OFFICIAL["x86_64"]))
    }
    assert [p["name"] for p in manifest["patches"]] == list(PATCHES)
    assert [p["sha256"] for p in manifest["patches"]] == [sha256(built.series_dir / name) for name in PATCHES]
    assert manifest["patches"][0]["subject"] == "[Bugfix][Kernel] Add the right number to alpha"
    assert manifest["patches"][1]["depends_on"] == ["alpha-fix"]
    assert manifest["patches"][2]["upstream_status"] == "Pending [not yet submitted]"
    assert manifest["files"].keys() == {"vllm/alpha.py", "vllm/gamma.py", "vllm/gone.py", "vllm/new.py"}
    assert manifest["files"]["vllm/gone.py"] is None


def test_record_holds_for_other_peoples_tools(built: Mini) -> None:
    with InstallerWheel.open(built.wheel()) as wheel:
        wheel.validate_record(validate_contents=True)
    target = built.root / "target"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", str(target)]
    # Whatever machine this is: the wheel holds no code that would run.
    command += ["--platform", "manylinux_2_28_x86_64", "--only-binary=:all:", str(built.wheel())]
    subprocess.run(command, check=True)
    (dist,) = distributions(name="vllm", path=[str(target)])
    assert dist.version == VERSION
    assert dist.entry_points["vllm"].value == "vllm.kept:x"
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=target, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == VERSION
    check = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(check, env=os.environ | {"PYTHONPATH": str(target)}, capture_output=True, text=True)
    assert "vllm" not in done.stdout


def test_verify_accepts_what_build_made(built: Mini, run: Run) -> None:
    told = require_ok(run("verify", "--arch", "x86_64")).err
    assert [line.split(":")[0].strip() for line in told.splitlines()[1:]] == [
        "record",
        "tags",
        "version",
        "patched",
        "untouched",
        "bill",
        "compiles",
    ]
    elsewhere = shutil.copytree(built.dist, built.root / "elsewhere")
    assert require_ok(run("verify", elsewhere / BUILT["x86_64"])).err == told


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_the_same_checkout_gives_the_same_bytes(mini: Mini, tmp_path: Path, arch: str) -> None:
    other = Mini(shutil.copytree(mini.root, tmp_path / "another folder" / "deeper" / "checkout", symlinks=True))
    require_ok(mini.outside("build", "--arch", arch))
    strange = {
        "TZ": "Pacific/Chatham",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "99999999",
        # As a hook or a rebase that calls the build would have it.
        "GIT_DIR": str(mini.root / "upstream" / ".git"),
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
    }
    require_ok(other.outside("build", "--arch", arch, prelude="import os; os.umask(0o077)", env=strange))
    assert mini.wheel(arch).read_bytes() == other.wheel(arch).read_bytes()
    assert git(mini.tree, "rev-parse", "HEAD") == git(other.tree, "rev-parse", "HEAD")


def test_a_part_of_the_series_makes_a_partial_wheel(mini: Mini, run: Run) -> None:
    require_ok(run("build", "--arch", "x86_64", "--until", "0002"))
    assert sorted(p.name for p in mini.dist.iterdir()) == [PARTIAL, f"{PARTIAL}.requirements.txt"]
    files = members(mini.dist / PARTIAL)
    assert b"x + 98" in files["vllm/gamma.py"]
    assert b"x + 100" in files["vllm/alpha.py"]
    info = PARTIAL.split("-cp38")[0] + ".dist-info"
    assert [p["name"] for p in json.loads(files[f"{info}/k3-patches.json"])["patches"]] == list(PATCHES[:2])


def test_skip_leaves_patches_out(mini: Mini, run: Run) -> None:
    require_ok(run("build", "--arch", "x86_64", "--skip", "0001", "--skip", "0002"))
    files = members(mini.dist / PARTIAL)
    assert b"x - 98" in files["vllm/gamma.py"]
    assert files["vllm/alpha.py"] == SOURCE["vllm/alpha.py"].encode()
    assert "vllm/gone.py" in files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--skip", "0001"), (PATCHES[1], "alpha-fix", "left out")),
        (("--until", "0009"), ("0009", "0001, 0002, 0003")),
        (("--skip", "1"), ("no patch 1", "0001, 0002, 0003")),
    ],
)
def test_a_choice_of_patches_that_cannot_be(
    mini: Mini, run: Run, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    require_error(run("build", *options), *words)
    assert not mini.tree.exists()


def test_stages_alone_do_what_build_does(mini: Mini, built_pattern: Mini) -> None:
    for stage in (("fetch",), ("apply",), ("wheel",), ("verify",)):
        require_ok(mini.outside(*stage, *(() if stage == ("apply",) else ("--arch", "x86_64"))))
    assert mini.wheel().read_bytes() == built_pattern.wheel().read_bytes()


def test_out_names_another_folder(built: Mini, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a new" / "folder"
    assert require_ok(run("wheel", "--arch", "x86_64", "--out", out)).out.strip() == str(out / BUILT["x86_64"])
    assert (out / BUILT["x86_64"]).read_bytes() == built.wheel().read_bytes()


def test_an_output_folder_on_another_file_system(built: Mini, run: Run, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    out = shm / f"k3-tooling-{os.getpid()}"
    out.mkdir()
    try:
        stale = out / f".{BUILT['x86_64']}.killed"
        stale.mkdir()
        (stale / BUILT["x86_64"]).write_bytes(b"half of a copy")
        require_ok(run("wheel", "--arch", "x86_64", "--out", out))
        assert sorted(p.name for p in out.iterdir()) == [BUILT["x86_64"], HASHED["x86_64"]]
        assert (out / BUILT["x86_64"]).read_bytes() == built.wheel().read_bytes()
    finally:
        shutil.rmtree(out)


def test_a_source_folder_in_place_of_the_sdist(mini: Mini, built_pattern: Mini) -> None:
    folder = mini.root / "checkout"
    write_files(folder, {name: content for name, content in SOURCE.items() if name != "vllm/_version.py"})
    git(folder, "init", "-q", ".")
    (mini.cache / SDIST).unlink()
    require_ok(mini.outside("build", "--arch", "x86_64", "--source-dir", folder))
    new, old = members(mini.wheel()), members(built_pattern.wheel())
    assert {n: new[n] for n in new if INFO not in n} == {n: old[n] for n in old if INFO not in n}
    assert json.loads(new[f"{INFO}/k3-patches.json"])["source"] == f"folder {folder.resolve()}"


def test_a_source_folder_of_another_release_is_no_base_for_the_wheel(mini: Mini, run: Run) -> None:
    folder = mini.root / "checkout"
    write_files(folder, {**SOURCE, "vllm/kept.py": "# of tomorrow\n"})
    require_error(
        run("build", "--arch", "x86_64", "--source-dir", folder), "vllm/kept.py", OFFICIAL["x86_64"], "--from-source"
    )
    assert not mini.dist.exists()


def test_a_folder_without_vllm_is_refused(mini: Mini, run: Run) -> None:
    require_error(run("build", "--source-dir", mini.root), "no vLLM source", str(mini.root))
    assert mini.leftovers() == []


@pytest.fixture
def repository(mini: Mini) -> Path:
    folder = mini.root / "vllm.git-checkout"
    write_files(folder, SOURCE)
    git(folder, "init", "-q", ".")
    git(folder, "add", "-A", "-f", ".")
    git(folder, "commit", "-q", "-m", "release")
    git(folder, "tag", "-a", "v0.27.1", "-m", "annotated")
    git(folder, "checkout", "-q", "-b", "next")
    write_files(folder, {"vllm/kept.py": SOURCE["vllm/kept.py"] + "# next\n"})
    git(folder, "commit", "-q", "-a", "-m", "next")
    return folder


@pytest.mark.parametrize("ref", ["main", "v0.27.1", "commit", "next~1", "short"])
def test_a_git_repository_in_place_of_the_sdist(mini: Mini, run: Run, repository: Path, ref: str) -> None:
    (mini.cache / SDIST).unlink()
    commit = git(repository, "rev-parse", "main").strip()
    require_ok(run("apply", "--git", f"file://{repository}", "--ref", "next"))
    assert (mini.tree / "vllm" / "kept.py").read_text().endswith("# next\n")
    chosen = {"commit": commit, "short": commit[:8]}.get(ref, ref)
    require_ok(run("build", "--arch", "x86_64", "--git", f"file://{repository}", "--ref", chosen))
    assert (mini.tree / "vllm" / "kept.py").read_text() == SOURCE["vllm/kept.py"]
    assert commit in json.loads(members(mini.wheel())[f"{INFO}/k3-patches.json"])["source"]


def test_a_repository_by_its_path_from_where_one_stands(mini: Mini, run: Run, repository: Path) -> None:
    require_ok(run("apply", "--git", repository.name, "--ref", "main"))
    assert (mini.tree / "vllm" / "new.py").is_file()


def test_what_is_in_the_store_is_not_sent_again(mini: Mini, run: Run, repository: Path) -> None:
    (repository / "vllm" / "large.py").write_text(secrets.token_hex(50_000))
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "large")
    require_ok(run("apply", "--git", repository, "--ref", "next"))
    before = stored(mini)
    (repository / "vllm" / "small.py").write_text("small")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "small")
    require_ok(run("apply", "--git", repository, "--ref", "next"))
    assert 0 < stored(mini) - before < 50_000
    # A commit that is there needs no repository.
    commit = git(repository, "rev-parse", "HEAD").strip()
    shutil.rmtree(repository)
    require_ok(run("apply", "--git", f"file://{repository}", "--ref", commit))


def stored(mini: Mini) -> int:
    """Bytes of what was fetched."""
    return sum(path.stat().st_size for path in mini.git_store.rglob("*") if path.is_file())


def test_a_fetch_that_was_killed_is_in_nobodys_way(mini: Mini, run: Run, repository: Path) -> None:
    require_ok(run("apply", "--git", repository, "--ref", "main"))
    (mini.git_store / "shallow.lock").touch()
    (mini.git_store / "refs" / "fetched" / "last.lock").touch()
    require_ok(run("apply", "--git", repository, "--ref", "next"))


def test_a_fetch_waits_for_another(mini: Mini, repository: Path) -> None:
    mini.git_store.mkdir(parents=True)
    others = mini.git_store / "shallow.lock"
    with FileLock(mini.git_store.with_suffix(".lock")):
        others.touch()
        process = mini.process("apply", "--git", repository, "--ref", "next")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        assert others.exists()
    process.communicate()
    assert process.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository to another owner")
def test_gits_reason_for_anothers_repository(mini: Mini, run: Run, repository: Path) -> None:
    os.chown(repository, 12345, 12345)
    os.chown(repository / ".git", 12345, 12345)
    error = require_error(run("apply", "--git", repository, "--ref", "main"), "cannot fetch main", "dubious ownership")
    assert "give a branch" not in error


def test_gits_reason_for_a_damaged_repository(mini: Mini, run: Run, repository: Path) -> None:
    tree = git(repository, "rev-parse", "main^{tree}").strip()
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    error = require_error(run("apply", "--git", repository, "--ref", "main"), "cannot fetch main", str(repository))
    assert "give a branch" not in error


@pytest.mark.parametrize("ref", ["v9.9.9", "0" * 40, "--upload-pack=touch pwned"])
def test_an_unknown_ref_is_named(mini: Mini, run: Run, repository: Path, ref: str) -> None:
    words = "cannot fetch", ref, str(repository), "give a branch"
    require_error(run("apply", "--git", f"file://{repository}", f"--ref={ref}"), *words)
    assert not mini.tree.exists()
    assert not list(mini.root.rglob("pwned"))


@pytest.mark.parametrize("device", ["empty", "broken"])
def test_from_source_runs_the_trees_own_build(
    mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", device)
    result = run("build", "--from-source", "--no-isolation", "--python", sys.executable)
    if device == "broken":
        require_error(result, "vLLM's own build", "VLLM_TARGET_DEVICE")
        assert not mini.dist.exists()
    else:
        require_ok(result)
        wheel = mini.dist / f"vllm-{VERSION}.empty-py3-none-any.whl"
        files = members(wheel)
        assert files["vllm/device.txt"] == b"empty"
        assert b"NEW" in files["vllm/new.py"]
        assert "vllm/gone.py" not in files
        manifest = json.loads(files[f"vllm-{VERSION}.empty.dist-info/k3-patches.json"])
        assert (manifest["build"], manifest["version"]) == ("source", f"{VERSION}.empty")
        require_ok(run("verify", wheel))
    assert mini.leftovers() == []
    assert git(mini.tree, "status", "--porcelain") == ""


def test_version_and_help(mini: Mini, run: Run) -> None:
    assert VERSION in require_ok(run("--version")).out
    assert "./build.sh --arch aarch64" in require_ok(run("--help")).out


def test_build_sh_is_a_thin_way_to_the_same(mini: Mini) -> None:
    # The tools' environment as an earlier run would have left it, so that nothing is installed here.
    tools = mini.build / "tools" / "bin"
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(sys.executable)
    key = subprocess.run(
        ["sh", "-c", '. ci/env.sh; k3_key "$PWD" ci/requirements.txt'],
        cwd=mini.root,
        capture_output=True,
        text=True,
        check=True,
    )
    (mini.build / "tools" / "made-for").write_text(key.stdout)
    # A symlinked interpreter outside its environment finds its packages only when told.
    site = next(p for p in map(Path, sys.path) if (p / "pooch").is_dir())
    (mini.root / "ci" / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    done = subprocess.run(
        [str(mini.root / "build.sh"), "--arch", "x86_64"],
        cwd="/",
        env=mini.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(mini.wheel())
