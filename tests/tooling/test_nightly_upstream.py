"""The nightly run with the real engine, on vLLM's repository as the sdists make it and a main with made-up changes.

So that it takes minutes and not an hour, the series is one patch of the newest base's, with its contracts alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fake_gh
import fake_upstream
import pytest
from k3patches import base as bases
from k3patches import fetch, series, status, tracking
from k3patches.contracts import contract_file
from k3patches.nightly_run import OUTCOME
from k3patches.pr import page as pull_requests
from k3patches.project import Project
from k3patches.upstream import results
from miniature import ROOT, git, known_text
from nightly_checkout import Hosted
from upstream import OTHER_LINE, Change, repository

PROJECT = Project(ROOT)
NEWEST = PROJECT.releases[-1]
# The next release: in all but its number it is the newest one.
NEXT = f"{NEWEST.split('.')[0]}.{int(NEWEST.split('.')[1]) + 1}.0"
# What a night that needs a person changes on a host that knew of nothing.
OPENED = ["POST labels", "POST issues"]


class Nightly(Hosted):
    """A project of one patch, in which ci/nightly.sh is the real one."""

    def __init__(self, folder: Path, upstream: Path, change: Change, index: str) -> None:
        root = folder / "project"
        there = root / "patches" / f"v{NEWEST}"
        there.mkdir(parents=True)
        for name in ("build.sh", "pyproject.toml", "README.md", "VERSION"):
            shutil.copy2(ROOT / name, root)
        (root / "patches" / "pr").mkdir()
        (root / "patches" / "pr" / "known.toml").write_text(known_text(change.patch.contracts))
        (root / "patches" / status.FILE).write_text(status.Table(PROJECT.revision, {}, {}).to_json())
        shutil.copytree(ROOT / "ci", root / "ci", ignore=shutil.ignore_patterns("__pycache__"))
        # Upstream's own tests have tests of their own, and take longer than all of this.
        fake_upstream.install(root)
        shutil.copy2(PROJECT.series_dir(NEWEST) / bases.FILE, there)
        shutil.copy2(change.patch.path, there / f"0001{change.patch.name[4:]}")
        (there / "series").write_text(f"0001{change.patch.name[4:]}\n")
        others = {p.name for p in (ROOT / "tests" / "contracts").glob("test_*.py")}
        others -= {contract_file(fix) for fix in change.patch.contracts}
        ignored = shutil.ignore_patterns("__pycache__", *others)
        shutil.copytree(ROOT / "tests" / "contracts", root / "tests" / "contracts", ignore=ignored)
        super().__init__(root, folder)
        tools = root / "build" / "tools" / "bin"
        tools.mkdir(parents=True)
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tools / "python").chmod(0o755)
        key = '. ci/env.sh && k3_key "$PWD" ci/requirements.txt >build/tools/made-for'
        subprocess.run(["sh", "-c", key], cwd=root, check=True)
        self.upstream = upstream
        self.environment |= {"PIP_INDEX_URL": index, "XDG_CACHE_HOME": str(folder / "cache")}
        self.page = folder / "summary.md"
        self.environment |= {"GITHUB_STEP_SUMMARY": str(self.page)}

    def night(self, *targets: str) -> dict[str, str]:
        """One night, in a fresh checkout; how the engine ended for each target."""
        self.page.write_text("")
        shutil.rmtree(self.out, ignore_errors=True)
        # What lies beside them only saves time.
        for pattern in ("v*", "git-*"):
            for kept in (self.root / "build" / "rebase").glob(pattern):
                shutil.rmtree(kept)
        self._script("rebase", "--python", sys.executable, "--git", self.upstream, *targets)
        self.clean()
        self._script("publish")
        return {
            path.parent.name: json.loads(path.read_text())["result"] for path in sorted(self.out.glob(f"*/{OUTCOME}"))
        }

    def needed_a_person(self, commit: str) -> None:
        """Publish such a night of main, without the engine."""
        folder = self.out / "main"
        shutil.rmtree(self.out, ignore_errors=True)
        folder.mkdir(parents=True)
        target = {"name": "main", "git": str(self.upstream), "commit": commit}
        (folder / OUTCOME).write_text(json.dumps({"target": target, "result": "person", "seconds": 1}))
        self._script("publish")

    def report(self, target: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.out / target / "report.json").read_text())
        return told

    def states(self, target: str) -> dict[str, str]:
        return {fix["fix"]: fix["state"] for fix in self.report(target)["fixes"]}

    def issue(self) -> dict[str, Any]:
        """The one issue that there is."""
        [issue] = [item for item in self.host["items"] if item["title"].startswith("vLLM main")]
        return issue

    def _script(self, *args: str | Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "GIT_"))}
        env = kept | {"PIP_CONFIG_FILE": os.devnull} | self.environment
        done = subprocess.run(
            [self.root / "ci" / "nightly.sh", *args], cwd=self.root, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def index_of(sdist: Path, release: str) -> Iterator[str]:
    """A package index whose only release of vLLM is ``release``, with the content of ``sdist``."""
    content = sdist.read_bytes()
    name = f"vllm-{release}.tar.gz"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(name):
                return self._send("application/gzip", content)
            files = [{"filename": name, "size": len(content), "hashes": _hashes(content)}]
            for arch in ("x86_64", "aarch64"):
                wheel = f"vllm-{release}-cp38-abi3-manylinux_2_28_{arch}.whl"
                files.append({"filename": wheel, "size": 1, "hashes": _hashes(wheel.encode())})
            for file in files:
                file |= {"url": f"/files/{file['filename']}", "upload-time": "2026-11-29T12:00:00Z"}
            page = {"meta": {"api-version": "1.1"}, "name": "vllm", "files": files, "versions": [release]}
            return self._send("application/vnd.pypi.simple.v1+json", json.dumps(page).encode())

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _hashes(content: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture(scope="module")
def sdists() -> dict[str, Path]:
    """Each base's sdist, from the cache that builds use."""
    pins = {release: bases.load(PROJECT.series_dir(release)).sdist for release in PROJECT.releases}
    return {release: fetch.fetch(pin, fetch.default_cache()) for release, pin in pins.items()}


@pytest.fixture(scope="module")
def upstream(sdists: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("upstream") / "vllm", list(sdists.items()))


@pytest.fixture(scope="module")
def change(upstream: Path) -> Change:
    return Change(upstream, f"v{NEWEST}", series.load(PROJECT.series_dir(NEWEST)))


@pytest.fixture(scope="module")
def project(
    sdists: dict[str, Path], upstream: Path, change: Change, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nightly]:
    folder = tmp_path_factory.mktemp("nightly")
    cache = folder / "cache" / "k3-patches"
    cache.mkdir(parents=True)
    (cache / sdists[NEWEST].name).symlink_to(sdists[NEWEST])
    with index_of(sdists[NEWEST], NEXT) as index:
        yield Nightly(folder, upstream, change, index)


@pytest.fixture
def nightly(project: Nightly, change: Change) -> Nightly:
    """Nothing was told to the host so far, and main is the newest release."""
    project.host = fake_gh.empty(project.remote)
    change.reset()
    return project


def test_the_repository_has_what_the_sdists_have(upstream: Path) -> None:
    assert git(upstream, "tag").split() == [f"v{release}" for release in sorted(PROJECT.releases)]
    names = git(upstream, "ls-tree", "-r", "--name-only", f"v{NEWEST}").splitlines()
    assert "vllm/__init__.py" in names
    assert "vllm/_version.py" not in names


@pytest.mark.parametrize("how", ["conflicting", "moved"])
def test_a_conflict_needs_a_person(nightly: Nightly, change: Change, how: str) -> None:
    """Upstream wrote something else there, or the function is in another file now."""
    commit = getattr(change, how)()
    assert nightly.night("main") == {"main": "person"}
    assert nightly.changes() == OPENED
    body = nightly.issue()["body"]
    assert commit in body
    assert "in conflict" in body
    hunks = body.split(f"### {change.path}\n")[1]
    marks = (
        f"<<<<<<< vLLM {commit[:12]}",
        f"||||||| vLLM {NEWEST}",
        "=======",
        f">>>>>>> vLLM {NEWEST} with {change.fix}",
    )
    places = [hunks.index(f"\n{mark}\n") for mark in marks]
    assert places == sorted(places)
    if how == "conflicting":
        assert OTHER_LINE in hunks[places[0] : places[1]]
        assert OTHER_LINE not in hunks[places[1] : places[3]]


def test_a_patch_that_does_its_job_no_more_is_as_loud(nightly: Nightly, change: Change) -> None:
    """It applies to the letter, and its contract tells that what it does is undone elsewhere."""
    commit = change.undone_elsewhere()
    assert nightly.night("main") == {"main": "person"}
    assert nightly.changes() == OPENED
    report = nightly.report("main")
    assert report["conflicts"] == []
    assert [(c["how"], c["moved"]) for c in report["carried"]] == [("clean", [])]
    assert set(nightly.states("main").values()) == {"needs a person"}
    body = nightly.issue()["body"]
    assert commit in body
    assert f"the contract of {', '.join(sorted(change.patch.contracts))} does not hold, though its patch" in body
    assert "\n- FAILED " in body


def test_a_new_release_and_a_fix_made_another_way(nightly: Nightly, change: Change) -> None:
    """The release's series is one pull request; main needs no patch any more, and so nobody."""
    nightly.needed_a_person(change.conflicting())
    assert nightly.issue()["state"] == "open"
    nightly.changes()
    change.reset()
    change.fixed_another_way()
    assert nightly.night() == {NEXT: "rebased", "main": "rebased"}
    assert set(nightly.states(NEXT).values()) == {"patched"}
    assert set(nightly.states("main").values()) == {"native"}
    assert [(d["fix"], d["why"]) for d in nightly.report("main")["dropped"]] == [(change.fix, "native")]
    number = nightly.issue()["number"]
    assert nightly.issue()["state"] == "closed"
    closed = [f"POST issues/{number}/comments", f"PATCH issues/{number}"]
    assert nightly.changes() == ["POST actions/workflows/test.yml/dispatches", "POST pulls", *closed]
    assert git(nightly.remote, "branch", "--list", "k3-rebase/*").split() == [f"k3-rebase/v{NEXT}"]
    branch = nightly.branch(f"k3-rebase/v{NEXT}")
    patch = f"0001{change.patch.name[4:]}"
    files = {f"patches/v{NEXT}/{name}" for name in ("series", bases.FILE, patch)}
    pages = {f"patches/{name}" for name in (status.FILE, tracking.PAGE, pull_requests.PAGE, results.FILE)}
    assert set(branch) == files | pages | {"README.md"}
    told = json.loads(branch[f"patches/{status.FILE}"])["bases"][NEXT]["fixes"]
    assert {fix: entry["state"] for fix, entry in told.items()} == dict.fromkeys(change.patch.contracts, "patched")
    for fix in change.patch.contracts:
        assert f"\n| `{fix}` | patched |\n" in branch["README.md"]
    assert branch[f"patches/v{NEXT}/{patch}"] == (nightly.root / "patches" / f"v{NEWEST}" / patch).read_text()
    [pull] = [item for item in nightly.host["items"] if item["number"] != number]
    assert f"vLLM {NEXT}: rebased" in pull["body"]
    assert "| vLLM main at" in nightly.page.read_text()
