"""What a wheel says of where it comes from: its bill of materials, its provenance, and the hash beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from damage import rewrite
from miniature import (
    BILL,
    BUILT,
    HASHED,
    INFO,
    OFFICIAL,
    PATCHES,
    RELEASE,
    SDIST,
    VERSION,
    Mini,
    Run,
    git,
    require_error,
    require_ok,
    sha256,
)

JSON = f"{INFO}/k3-patches.json"
Json = dict[str, Any]


def read(path: Path, member: str) -> bytes:
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(member)


def provenance(path: Path) -> Json:
    return dict(json.loads(read(path, JSON))["provenance"])


def project_of(path: Path) -> Json:
    return dict(provenance(path)["buildDefinition"]["resolvedDependencies"][0])


@pytest.fixture
def bill(built: Mini) -> Json:
    return dict(json.loads(read(built.wheel(), BILL)))


@pytest.fixture
def checkout(mini: Mini) -> Mini:
    """The miniature as a git checkout with all of it committed; the working folders are ignored."""
    (mini.root / ".gitignore").write_text("/build/\n/dist/\n/cache/\n/files/\n/upstream/\n__pycache__/\n")
    git(mini.root, "init", "-q", ".")
    git(mini.root, "add", "-A")
    git(mini.root, "commit", "-q", "-m", "all")
    return mini


def test_the_bill_is_cyclonedx(built: Mini) -> None:
    text = read(built.wheel(), BILL).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    # The validator does find what is wrong.
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"SHA-256"', '"SHA-255"')) is not None


def test_the_bill_names_the_wheel_its_archives_and_its_patches(built: Mini, bill: Json) -> None:
    wheel = bill["metadata"]["component"]
    assert (wheel["name"], wheel["version"]) == ("vllm", VERSION)
    assert wheel["purl"] == "pkg:pypi/vllm@0.27.1%2Bk3.7"
    ancestors = {a["bom-ref"]: a for a in wheel["pedigree"]["ancestors"]}
    for name in (SDIST, OFFICIAL["x86_64"]):
        assert ancestors[name]["hashes"] == [{"alg": "SHA-256", "content": sha256(built.files / name)}]
        assert ancestors[name]["purl"].startswith(f"pkg:pypi/vllm@{RELEASE}?file_name=vllm-{RELEASE}")
    assert len(ancestors) == 2
    pedigree = {p["diff"]["url"]: [r["id"] for r in p["resolves"]] for p in wheel["pedigree"]["patches"]}
    folder = f"patches/v{RELEASE}"
    assert pedigree == {f"{folder}/{name}": [name[5:].removesuffix(".patch")] for name in PATCHES}
    files = {c["name"]: c["hashes"][0]["content"] for c in bill["components"] if c["type"] == "file"}
    assert files == {f"{folder}/{name}": sha256(built.series_dir / name) for name in PATCHES}


def test_the_bill_lists_what_the_wheel_requires(bill: Json) -> None:
    found = {c["name"]: (c.get("version"), c["scope"]) for c in bill["components"] if c["type"] == "library"}
    assert found == {
        "numpy": (None, "required"),
        "torch": ("2.13.0", "required"),
        "tqdm": (None, "required"),
        "tabulate": (None, "optional"),
    }
    (needed,) = [d["dependsOn"] for d in bill["dependencies"] if d["ref"] == f"vllm@{VERSION}"]
    assert {f"requires:{name}" for name in found} < set(needed)


def test_the_bill_has_neither_a_time_nor_a_number_of_the_build(built: Mini, bill: Json) -> None:
    assert bill["metadata"]["timestamp"] == "2026-08-11T10:59:48+00:00"
    other = built.root / "other"
    for name in ("build", "dist"):
        shutil.rmtree(built.root / name)
    require_ok(built.outside("build", "--arch", "x86_64", "--out", other, env={"TZ": "Asia/Tokyo"}))
    assert json.loads(read(other / BUILT["x86_64"], BILL)) == bill


def test_sbom_prints_it(built: Mini, run: Run) -> None:
    assert require_ok(run("sbom", built.wheel())).out.encode() == read(built.wheel(), BILL)
    require_error(run("sbom", built.files / OFFICIAL["x86_64"]), OFFICIAL["x86_64"], "carries no sboms/")
    require_error(run("sbom", built.series_dir / "series"), "no intact wheel")


@pytest.mark.parametrize("content", [None, b"", b"{}\n", "other"])
def test_verify_finds_a_bill_that_is_not_the_wheels(built: Mini, run: Run, content: bytes | str | None) -> None:
    if content == "other":
        content = read(built.wheel(), BILL).replace(b"alpha-fix", b"delta-fix")
    assert content is None or isinstance(content, bytes)
    require_error(run("verify", rewrite(built.wheel(), {BILL: content})), "check 'bill'", "sboms/k3-patches.cdx.json")


def test_status_finds_a_bill_that_was_changed(built: Mini, run: Run) -> None:
    result = run("status", "--json", rewrite(built.wheel(), {BILL: b"{}"}, record=False))
    assert result.code == 4
    assert [d for d in json.loads(result.out)["damaged"] if "sboms/k3-patches.cdx.json" in d]


# Provenance


def test_a_clean_checkout_is_named_by_its_commit(checkout: Mini, run: Run) -> None:
    require_ok(run("build", "--arch", "x86_64"))
    commit = git(checkout.root, "rev-parse", "HEAD").strip()
    project = project_of(checkout.wheel())
    assert (project["digest"], project["annotations"]) == ({"gitCommit": commit}, {"changed": False})
    assert f"built by commit {commit}\n" in run("status", checkout.wheel()).out
    assert f"built by commit {commit}\n" in require_ok(run("verify", checkout.wheel())).err


@pytest.mark.parametrize(
    ("name", "changed"),
    [("patches/v0.27.1/series", True), ("ci/k3patches/more.py", True), ("README.md", False), ("tests/x.py", False)],
)
def test_only_what_a_wheel_is_made_from_makes_a_checkout_changed(
    checkout: Mini, run: Run, name: str, changed: bool
) -> None:
    with (checkout.root / name).open("a") as f:
        f.write("# more\n")
    require_ok(run("build", "--arch", "x86_64"))
    assert project_of(checkout.wheel())["annotations"] == {"changed": changed}
    assert (", changed since" in run("status", checkout.wheel()).out) is changed


def test_a_clone_in_another_folder_gives_the_same_bytes(checkout: Mini, run: Run, tmp_path: Path) -> None:
    clone = tmp_path / "elsewhere" / "clone"
    git(tmp_path, "clone", "-q", str(checkout.root), str(clone))
    shutil.copytree(checkout.root / "cache", clone / "cache")
    require_ok(run("build", "--arch", "x86_64"))
    require_ok(Mini(clone).outside("build", "--arch", "x86_64"))
    assert Mini(clone).wheel().read_bytes() == checkout.wheel().read_bytes()


def test_a_folder_that_is_no_checkout_of_its_own_names_no_commit(built: Mini, run: Run) -> None:
    # As an unpacked archive that lies in somebody's repository.
    assert "digest" not in project_of(built.wheel())
    git(built.root.parent, "init", "-q", ".")
    git(built.root.parent, "commit", "-q", "--allow-empty", "-m", "another project")
    require_ok(run("wheel", "--arch", "x86_64"))
    assert "digest" not in project_of(built.wheel())
    assert "built by a folder without git" in run("status", built.wheel()).out


def test_the_provenance_is_in_slsas_terms_and_names_no_folder(built: Mini) -> None:
    told = provenance(built.wheel())
    definition = told["buildDefinition"]
    assert definition["buildType"] == "k3-patches:overlay/1"
    assert definition["externalParameters"]["patches"] == list(PATCHES)
    archives = {d["name"]: d["digest"]["sha256"] for d in definition["resolvedDependencies"][1:]}
    assert archives == {name: sha256(built.files / name) for name in (SDIST, OFFICIAL["x86_64"])}
    assert told["runDetails"]["builder"]["version"].keys() == {"cyclonedx-python-lib", "wheel", "zlib"}
    assert str(built.root) not in json.dumps(told)


@pytest.mark.parametrize("value", [None, [], {}, {"buildDefinition": {"resolvedDependencies": []}}])
def test_a_provenance_that_is_none(built: Mini, run: Run, value: object) -> None:
    def change(content: bytes) -> bytes:
        return json.dumps(json.loads(content) | {"provenance": value}).encode()

    assert run("status", rewrite(built.wheel(), {JSON: change})).code == 4


# The hash beside the wheel


def test_pips_hash_mode_takes_the_wheel_and_no_other(built: Mini, tmp_path: Path) -> None:
    hashed = built.dist / HASHED["x86_64"]
    assert hashed.read_text().splitlines()[-1] == f"vllm=={VERSION} --hash=sha256:{sha256(built.wheel())}"

    def install(target: Path) -> subprocess.CompletedProcess[str]:
        # From another folder than the wheel's; whatever machine this is, the wheel holds no code that would run.
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--require-hashes", "-r", str(hashed)]
        command += ["--target", str(target), "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = install(tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "good" / INFO / "sboms" / "k3-patches.cdx.json").is_file()
    rewrite(built.wheel(), {"vllm/kept.py": b"# other\n"})
    done = install(tmp_path / "bad")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "bad" / "vllm").exists()


def test_no_hash_of_an_older_build_stays(built: Mini, run: Run) -> None:
    (built.dist / HASHED["x86_64"]).write_text("of another build\n")
    require_ok(run("wheel", "--arch", "x86_64"))
    assert sha256(built.wheel()) in (built.dist / HASHED["x86_64"]).read_text()
