"""The nightly run with an engine that does as planned: what is found, kept, opened, updated and closed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_upstream
import pytest
from k3patches import nightly_run, nightly_text, releases
from k3patches.errors import UserError
from k3patches.index import PipConfig
from k3patches.nightly_find import Target
from k3patches.nightly_run import Result, belongs
from k3patches.project import Project
from miniature import RELEASE, Mini, git, in_process, require_error, require_ok
from nightly_checkout import Checkout
from package_index import PackageIndex
from pypi_simple import ProjectPage, PyPISimple

NEW = "0.34.0"
BRANCH = f"k3-rebase/v{NEW}"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: The Engine <engine@example.com>
Date: Mon, 30 Nov 2026 00:00:00 +0000
Subject: [PATCH] Add the right number to alpha

Contract: alpha-fix
---
diff --git a/vllm/alpha.py b/vllm/alpha.py
--- a/vllm/alpha.py
+++ b/vllm/alpha.py
@@ -1 +1 @@
-99
+100
"""
BASE = f"""\
release = "{NEW}"
commit = "6e448d0ea"
released = 2026-11-29T10:59:48Z
torch = "2.14.0"
wheel = {{}}

[sdist]
filename = "vllm-{NEW}.tar.gz"
size = 1
sha256 = "{"0" * 64}"
"""
SERIES = {
    f"patches/v{NEW}/series": "0001-alpha-fix.patch\n",
    f"patches/v{NEW}/0001-alpha-fix.patch": PATCH,
    f"patches/v{NEW}/base.toml": BASE,
    f"patches/resolutions/v{NEW}/alpha-fix.patch": "how a person resolved it\n",
}
REBASED = {NEW: {"code": 0, "files": SERIES, "report": "# Rebased\n\n`alpha-fix` is native.\n"}}
UPSTREAM_TESTS = "patches/upstream-tests.json"
PERSON = {"code": 4, "report": "# Needs a person\n\n```diff\n<<<<<<< upstream\n@decorated\n```\nAsk @somebody.\n"}


@pytest.fixture
def checkout(mini: Mini, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(mini, tmp_path, monkeypatch)


def issues(checkout: Checkout) -> list[dict[str, Any]]:
    return [item for item in checkout.host["items"] if "pull_request" not in item]


def pushed(checkout: Checkout, branch: str = BRANCH) -> dict[str, str]:
    """What a branch on the host adds, but for the status table and upstream's tests, which it must have."""
    files = checkout.branch(branch)
    pages = ("README.md", "patches/status.json", "patches/TRACKING.md", "patches/PULL_REQUESTS.md", UPSTREAM_TESTS)
    assert {files.pop(name, "") for name in pages}.isdisjoint([""])
    return files


def tampered(checkout: Checkout, change: Callable[[dict[str, Any]], object], release: str = NEW) -> None:
    """Rebase, and change what was measured before the publishing step sees it."""
    checkout.plan({**REBASED, "main": PERSON})
    require_ok(checkout.run("rebase", "--git", checkout.upstream, release, "main"))
    checkout.clean()
    path = checkout.out / release / "status.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


# What there is to do.


def test_new_releases_come_in_order_and_main_last(checkout: Checkout) -> None:
    checkout.release("0.34.0", "0.28.0", "0.100.0", "0.27.0", "0.34.1rc1", "0.34.0.post1", "0.35.0.dev3")
    result = require_ok(checkout.run("find", "--git", checkout.upstream))
    main = git(checkout.upstream, "rev-parse", "main").strip()
    assert result.out.splitlines() == ["0.28.0", "0.34.0", "0.100.0", f"main {main}"]
    told = json.loads(require_ok(checkout.run("find", "--json", "--git", checkout.upstream)).out)
    assert told[-1] == {"name": "main", "git": str(checkout.upstream), "commit": main}


@pytest.mark.parametrize(
    ("bases", "expected"),
    [
        (["0.27.1"], ["0.27.1.1", "0.28.0", "0.28.1", "0.29.0"]),
        (["0.27.1", "0.29.0"], ["0.27.1.1", "0.28.0", "0.28.1"]),
        (["0.27.1", "0.28.0", "0.28.1", "0.29.0"], ["0.27.1.1"]),
        (["0.27.1.1", "0.28.0", "0.28.1", "0.29"], []),
    ],
)
def test_a_release_between_two_bases_is_missing_and_an_older_one_is_not(bases: list[str], expected: list[str]) -> None:
    there = ["0.29.0", "0.28.1", "0.28.0", "0.27.1.1", "0.27.1", "0.27.0", "0.9.2"]
    assert releases.missing(bases, there) == expected


def test_only_sdists_of_final_releases_that_were_not_taken_back_count(monkeypatch: pytest.MonkeyPatch) -> None:
    page = """
        <a href="vllm-0.34.0.tar.gz">vllm-0.34.0.tar.gz</a>
        <a href="vllm-0.35.0.tar.gz" data-yanked="broken">vllm-0.35.0.tar.gz</a>
        <a href="vllm-0.36.0-cp38-abi3-manylinux_2_28_x86_64.whl">vllm-0.36.0-cp38-abi3-manylinux_2_28_x86_64.whl</a>
        <a href="vllm-0.37.0rc1.tar.gz">vllm-0.37.0rc1.tar.gz</a>
    """
    found = ProjectPage.from_html("vllm", page, "https://index.example/simple/vllm/")
    monkeypatch.setattr(PyPISimple, "get_project_page", lambda *args, **options: found)
    assert releases.published(PipConfig(["https://index.example/simple"])) == ["0.34.0"]


def test_an_index_that_does_not_answer(checkout: Checkout, index: PackageIndex) -> None:
    index.page_status = 503
    require_error(checkout.run("find", "--git", checkout.upstream), "package index", "127.0.0.1", "index-url")


@pytest.mark.parametrize("url", ["nowhere", "files"])
def test_a_repository_that_is_none(checkout: Checkout, url: str) -> None:
    require_error(checkout.run("find", "--git", checkout.root / url), url, "--git")


def test_a_repository_without_main(checkout: Checkout) -> None:
    git(checkout.upstream, "branch", "-m", "main", "trunk")
    require_error(checkout.run("find", "--git", checkout.upstream), "no branch main")


def test_a_target_that_is_none(checkout: Checkout) -> None:
    require_error(checkout.run("rebase", "v0.34"), "v0.34 is no target")


# The engine's runs.


def test_the_engine_is_run_for_each_target_and_its_results_kept(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout.release(NEW, "0.34.1")
    checkout.plan({**REBASED, "0.34.1": PERSON})
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    result = require_ok(checkout.run("rebase", "--git", checkout.upstream))
    main = git(checkout.upstream, "rev-parse", "main").strip()
    assert checkout.asked() == [[NEW], ["0.34.1"], [main, "--git", str(checkout.upstream)]]
    assert [line.split(" | ")[1] for line in result.out.splitlines()[2:]] == [
        "rebased",
        "needs a person",
        "nothing to do",
    ]
    kept = checkout.out / NEW
    assert {p.relative_to(kept / "files").as_posix() for p in kept.rglob("files/**/*") if p.is_file()} == set(SERIES)
    assert not (checkout.out / "0.34.1" / "files").exists()
    assert json.loads((checkout.out / "main" / "outcome.json").read_text())["target"]["commit"] == main
    assert page.read_text().count("<details>") == 3
    assert "`alpha-fix` is native." in page.read_text()


def test_an_engine_that_fails_fails_the_run_and_not_the_other_targets(checkout: Checkout) -> None:
    checkout.release(NEW, "0.34.1")
    # What the engine of 0.34.1 wrote is another release's, and so there is nothing to measure.
    checkout.plan({NEW: {"code": 1}, "main": {"code": 77}, "0.34.1": REBASED[NEW]})
    require_error(checkout.run("rebase", "--git", checkout.upstream), f"vLLM {NEW}, vLLM 0.34.1, vLLM main")
    assert len(checkout.asked()) == 3
    checkout.clean()
    require_ok(checkout.run("publish"))
    assert checkout.host["items"] == []


def test_an_engine_that_hangs_is_ended(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.plan({NEW: {"code": 0, "sleep": 60}})
    monkeypatch.setattr("k3patches.nightly.MINUTE_S", 0.05)
    require_error(checkout.run("rebase", "--limit", "1", NEW), f"failed for vLLM {NEW}")


@pytest.mark.parametrize(("code", "how"), [(-9, "by signal 9 (Killed)"), (77, "with exit code 77")])
def test_an_engine_that_ends_without_a_word_is_told_of(checkout: Checkout, code: int, how: str) -> None:
    checkout.plan({NEW: {"code": code}})
    result = checkout.run("rebase", NEW)
    require_error(result, f"failed for vLLM {NEW}")
    assert f"ended {how}" in result.err


def test_an_engine_that_leaves_no_report_has_nothing_to_tell(checkout: Checkout) -> None:
    checkout.plan({NEW: {**PERSON, "report": ""}})
    result = checkout.run("rebase", NEW)
    require_error(result, f"failed for vLLM {NEW}")
    assert "left no report" in result.err
    require_ok(checkout.run("publish"))
    assert checkout.changes() == []


def test_nothing_to_publish(checkout: Checkout) -> None:
    require_error(checkout.run("publish"), "no outcomes", "rebase")


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"target": {"name": "0.34.0"}, "result": "fine", "seconds": 1}',
        '{"target": {"name": "../x"}, "result": "person", "seconds": 1}',
        '{"target": {"name": "main", "git": null}, "result": "person", "seconds": 1}',
        '{"target": {"name": "0.34.0", "git": "x"}, "result": "person", "seconds": 1}',
    ],
)
def test_an_outcome_that_is_none(checkout: Checkout, damage: str) -> None:
    (checkout.out / NEW).mkdir(parents=True)
    (checkout.out / NEW / "outcome.json").write_text(damage)
    require_error(checkout.run("publish"), "outcome.json")


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("patches/v0.34.0/series", True),
        ("patches/v0.34.0/0001-a.patch", True),
        ("patches/resolutions/v0.34.0/a.patch", True),
        ("patches/resolutions/v0.33.0/a.patch", False),
        ("patches/resolutions/a.patch", False),
        ("patches/v0.33.0/series", False),
        ("patches/v0.34.0/.git", False),
        ("patches/v0.34.0/more/deep", False),
        ("patches/resolutions", False),
        ("patches/status.json", False),
        ("README.md", False),
        ("patches/../ci/test.sh", False),
        ("ci/test.sh", False),
        (".github/workflows/test.yml", False),
    ],
)
def test_what_a_rebase_may_write(name: str, fits: bool) -> None:
    assert belongs(name, Target(NEW)) == fits
    assert not belongs(name, Target("main", "url", "0" * 40))


@pytest.mark.parametrize("how", ["elsewhere", "link", "large"])
def test_files_that_are_no_series_are_not_pushed(checkout: Checkout, how: str) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.run("rebase", NEW))
    files = checkout.out / NEW / "files"
    if how == "elsewhere":
        (files / "ci").mkdir()
        (files / "ci" / "test.sh").write_text("#!/bin/sh\n")
    elif how == "link":
        (files / "patches" / f"v{NEW}" / "more").symlink_to("/etc/hostname")
    else:
        (files / "patches" / f"v{NEW}" / "0002-a.patch").write_bytes(bytes(5 << 20))
    result = checkout.run("publish")
    require_error(result, f"vLLM {NEW}")
    assert ("nothing that a rebase may write" in result.err) == (how != "large")
    assert checkout.changes() == []
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


# Pull requests.


def test_a_rebased_release_is_one_pull_request(checkout: Checkout) -> None:
    checkout.plan(REBASED)
    before = checkout.head("main")
    require_ok(checkout.night(NEW))
    assert checkout.changes() == ["POST actions/workflows/test.yml/dispatches", "POST pulls"]
    pull = checkout.item(1)
    assert (pull["head"], pull["base"]) == (f"somebody:{BRANCH}", "main")
    assert pull["title"] == "vLLM 0.34.0: the series, rebased"
    assert "`alpha-fix` is native." in pull["body"]
    assert pushed(checkout) == SERIES
    assert checkout.head(f"{BRANCH}^") == before == checkout.head("main")
    assert git(checkout.remote, "log", "-1", "--format=%an %ce", BRANCH).startswith("k3-patches maintainers@")
    # The checkout itself is as it was.
    assert git(checkout.root, "status", "--porcelain") == ""
    assert git(checkout.root, "worktree", "list").count("\n") == 1


def test_the_same_result_the_next_night_changes_nothing(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    head = checkout.head(BRANCH)
    checkout.changes()
    require_ok(checkout.night(NEW))
    assert checkout.changes() == []
    # Also where main went on in the meantime.
    readme = checkout.root / "README.md"
    readme.write_text("more\n" + readme.read_text())
    git(checkout.root, "add", "README.md")
    git(checkout.root, "commit", "-q", "-m", "More")
    git(checkout.root, "push", "-q", "origin", "main")
    require_ok(checkout.night(NEW))
    assert checkout.changes() == []
    assert checkout.head(BRANCH) == head


def test_another_result_updates_the_pull_request(checkout: Checkout) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    checkout.changes()
    other = {f"patches/v{NEW}/series": "# none\n", f"patches/v{NEW}/base.toml": BASE}
    checkout.plan({NEW: {"code": 0, "files": other, "report": "# Again\n"}})
    require_ok(checkout.night(NEW))
    assert checkout.changes() == ["POST actions/workflows/test.yml/dispatches", "PATCH pulls/1"]
    assert "# Again" in checkout.item(1)["body"]
    assert pushed(checkout) == other
    assert len(checkout.host["items"]) == 1


def test_a_branch_that_a_person_pushed_to_is_left_alone(checkout: Checkout, tmp_path: Path) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    person = tmp_path / "person"
    git(tmp_path, "clone", "-q", "-b", BRANCH, str(checkout.remote), str(person))
    (person / "patches" / f"v{NEW}" / "0001-alpha-fix.patch").write_text("By hand\n")
    git(person, "commit", "-q", "-a", "-m", "Mend it")
    git(person, "push", "-q", "origin", BRANCH)
    head = checkout.head(BRANCH)
    checkout.changes()
    checkout.plan({NEW: {**REBASED[NEW], "report": "# Another report\n"}})
    result = require_ok(checkout.night(NEW))
    assert "commits of a person's" in result.out
    assert checkout.changes() == []
    assert checkout.head(BRANCH) == head


def test_a_pull_request_that_a_person_closed_stays_closed(checkout: Checkout) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    checkout.item(1, state="closed")
    checkout.changes()
    git(checkout.remote, "branch", "-q", "-D", BRANCH)
    result = require_ok(checkout.night(NEW))
    assert "closed unmerged" in result.out
    assert checkout.changes() == []
    assert git(checkout.remote, "branch", "--list", BRANCH) == ""


def test_a_merge_that_was_taken_back_is_asked_anew(checkout: Checkout) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    checkout.item(1, state="closed", merged_at="2026-11-30T00:00:00Z")
    git(checkout.remote, "branch", "-q", "-D", BRANCH)
    require_ok(checkout.night(NEW))
    assert checkout.item(2)["state"] == "open"


def test_a_forks_pull_request_from_a_branch_of_that_name_is_another(checkout: Checkout) -> None:
    state = checkout.host
    alien = {"number": 1, "title": "x", "body": "", "head": f"stranger:{BRANCH}", "state": "closed", "merged_at": None}
    checkout.host = {**state, "items": [{**alien, "labels": [], "pull_request": {}, "comments": []}]}
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    assert checkout.item(2)["head"] == f"somebody:{BRANCH}"


def test_two_releases_in_one_night(checkout: Checkout) -> None:
    checkout.release(NEW, "0.34.1")
    later = {k.replace(NEW, "0.34.1"): v.replace(NEW, "0.34.1") for k, v in SERIES.items() if "resolutions" not in k}
    checkout.plan({**REBASED, "0.34.1": {"code": 0, "files": later}})
    require_ok(checkout.night())
    assert [item["head"] for item in checkout.host["items"]] == [f"somebody:k3-rebase/v{v}" for v in (NEW, "0.34.1")]
    assert pushed(checkout, "k3-rebase/v0.34.1") == later
    # Each is for itself, and the one that is merged last goes along with the other the next night.
    assert list(table_of(checkout)) == [RELEASE, NEW]
    git(checkout.root, "fetch", "-q", "origin", BRANCH)
    git(checkout.root, "merge", "-q", "--ff-only", "FETCH_HEAD")
    git(checkout.root, "push", "-q", "origin", "main")
    checkout.changes()
    shutil.rmtree(checkout.out)
    checkout.plan({"0.34.1": {"code": 0, "files": later}})
    require_ok(checkout.night("0.34.1"))
    assert checkout.changes() == ["POST actions/workflows/test.yml/dispatches"]
    assert list(table_of(checkout, "k3-rebase/v0.34.1")) == [RELEASE, NEW, "0.34.1"]
    assert pushed(checkout, "k3-rebase/v0.34.1") == later


def test_a_repository_that_lets_no_workflow_open_pull_requests(checkout: Checkout) -> None:
    message = "GitHub Actions is not permitted to create or approve pull requests."
    checkout.host = {**checkout.host, "refuse": {"POST pulls": message}}
    checkout.plan({**REBASED, "main": PERSON})
    result = checkout.night(NEW, "main")
    require_error(result, f"vLLM {NEW}")
    assert "Settings, Actions, General" in result.err
    # The issue of the other target is opened all the same.
    assert len(issues(checkout)) == 1


def test_an_engine_that_wrote_no_series_is_found_out(checkout: Checkout) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.run("rebase", NEW))
    checkout.clean()
    shutil.rmtree(checkout.out / NEW / "files")
    result = checkout.run("publish")
    require_error(result, NEW)
    assert "wrote no series" in result.err
    assert checkout.changes() == []


# The status table in it.


def table_of(checkout: Checkout, branch: str = BRANCH) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(checkout.branch(branch)["patches/status.json"])["bases"]
    return table


def test_the_status_table_is_of_what_is_committed(checkout: Checkout, tmp_path: Path) -> None:
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    before = checkout.measured.to_dict()["bases"][RELEASE]
    fixes = table_of(checkout)[NEW]["fixes"]
    assert {fix: told["state"] for fix, told in fixes.items()} == {
        "alpha-fix": "patched",
        "beta-fix": "native",
        "gamma-fix": "native",
    }
    assert table_of(checkout) == {RELEASE: before, NEW: table_of(checkout)[NEW]}
    readme = checkout.branch(BRANCH)["README.md"]
    assert f"| fix | {RELEASE} | {NEW} |\n|---|---|---|\n| `alpha-fix` | patched | patched |\n" in readme
    assert readme.startswith("# A project\n")
    assert readme.endswith("The rest.\n")
    # The check that CI starts with holds on the branch, and not on main with the series alone.
    there = Mini(tmp_path / "there")
    git(tmp_path, "clone", "-q", "-b", BRANCH, str(checkout.remote), str(there.root))
    with pytest.MonkeyPatch.context() as patch:
        current = in_process(there, patch)
        require_ok(current("table", "--current"))
        git(there.root, "checkout", "-q", "HEAD^", "--", "patches/status.json", "patches/TRACKING.md", "README.md")
        require_error(current("table", "--current"), f"{NEW} was not measured")


def test_a_status_that_cannot_be_measured_fails_the_run(checkout: Checkout) -> None:
    checkout.plan({NEW: {**REBASED[NEW], "status": None}, "main": PERSON})
    result = checkout.run("rebase", "--git", checkout.upstream, NEW, "main")
    require_error(result, f"failed for vLLM {NEW}: ")
    assert "its status could not be measured" in result.err
    checkout.clean()
    require_ok(checkout.run("publish"))
    assert checkout.changes() == ["POST labels", "POST issues"]
    assert checkout.item(1)["title"].startswith("vLLM main")


def test_measuring_takes_what_time_the_engine_left(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.plan(REBASED)
    seen: list[float] = []

    def engine(command: list[str], cwd: Path, limit_s: float) -> Result:
        seen.append(limit_s)
        assert len(seen) == 1 or command[0].endswith("ci/status.sh")
        # time.sleep does nothing here.
        threading.Event().wait(0.05)
        return Result.REBASED

    monkeypatch.setattr(nightly_run, "_result", engine)
    report = checkout.root / "build" / "nightly" / NEW / "report.md"
    monkeypatch.setattr(Path, "is_file", lambda path, real=Path.is_file: path == report or real(path))
    require_error(checkout.run("rebase", "--limit", "1", NEW), NEW)
    assert seen[0] == 60
    assert 50 < seen[1] < 59.96


def change_counts(told: dict[str, Any], fix: str = "alpha-fix", release: str = NEW, **patched: Any) -> None:
    told["bases"][release]["fixes"][fix]["patched"].update(patched)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told.clear(), "no status table"),
        (lambda told: told.update(more=1), "no status table"),
        (lambda told: told.update(revision=True), "no status table"),
        (lambda told: told.update(revision=8), "its revision is 8 and not 7"),
        (lambda told: told.update(ran_on={"python": "3.11.9"}), "which Python and torch"),
        (lambda told: told["ran_on"].update(torch="<script>"), "which Python and torch"),
        (lambda told: told["bases"].update({"0.33.0": told["bases"][NEW]}), "it is of '0.34.0', '0.33.0'"),
        (lambda told: told["bases"].update({"0.33.0": told["bases"].pop(NEW)}), "it is of '0.33.0'"),
        (lambda told: told["bases"].clear(), "it is of no release"),
        (lambda told: told["bases"][NEW].update(more="x"), "no status table"),
        (lambda told: told["bases"][NEW].update(commit=None), "no status table"),
        (lambda told: told["bases"][NEW].update(series_sha256="0" * 64), "its series changed since"),
        (lambda told: told["bases"][NEW].update(contracts_sha256="0" * 64), "the contracts changed since"),
        (lambda told: told["bases"][NEW].update(sdist_sha256="1" * 64), "its sdist changed since"),
        (lambda told: told["bases"][NEW].update(torch="2.13.0"), "its torch changed since"),
        (lambda told: told["bases"][NEW]["fixes"].pop("beta-fix"), "not those that have a contract"),
        (lambda told: told["bases"][NEW]["fixes"]["beta-fix"].update(state="patched"), "no status table"),
        (lambda told: told["bases"][NEW]["fixes"]["beta-fix"].update(state="fine"), "no status table"),
        (lambda told: told["bases"][NEW]["fixes"]["beta-fix"].update(more=1), "no status table"),
        (
            lambda told: told["bases"][NEW]["fixes"]["beta-fix"].update(patches=["0001-alpha-fix.patch"]),
            "other patches",
        ),
        (lambda told: change_counts(told, passed=-1), "no status table"),
        (lambda told: change_counts(told, passed=1.0), "no status table"),
        (lambda told: change_counts(told, passed=True), "no status table"),
        (lambda told: change_counts(told, passed="1"), "no status table"),
        (lambda told: change_counts(told, surprised=1), "no status table"),
        (lambda told: change_counts(told, not_run=3), "cut short"),
    ],
)
def test_a_status_that_is_not_of_what_is_committed_is_an_error(
    checkout: Checkout, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    tampered(checkout, change)
    result = checkout.run("publish")
    require_error(result, f"vLLM {NEW}")
    assert words in result.err
    assert "status.json" in result.err
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""
    # The issue of the other target is opened all the same.
    assert [item["title"] for item in checkout.host["items"]] == [nightly_text.issue_title(Target("main"))]
    assert git(checkout.root, "worktree", "list").count("\n") == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [("missing", "is missing"), ("link", "is missing"), ("large", "too large"), ("deep", "no status"), ("text", "no")],
)
def test_a_status_file_that_is_none(checkout: Checkout, how: str, words: str) -> None:
    tampered(checkout, lambda told: None)
    path = checkout.out / NEW / "status.json"
    content = path.read_bytes()
    path.unlink()
    if how == "link":
        path.with_name("there.json").write_bytes(content)
        path.symlink_to("there.json")
    elif how != "missing":
        path.write_bytes({"large": content + b" " * (1 << 20), "deep": b"[" * 100_000, "text": b"\xff"}[how])
    result = checkout.run("publish")
    require_error(result, f"vLLM {NEW}")
    assert f"{path} {words}" in result.err or f"{path} is {words}" in result.err
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


def test_a_series_that_was_changed_after_it_was_measured(checkout: Checkout) -> None:
    tampered(checkout, lambda told: None)
    path = checkout.out / NEW / "files" / "patches" / f"v{NEW}" / "0001-alpha-fix.patch"
    path.write_text(path.read_text().replace("+100", "+101"))
    result = checkout.run("publish")
    require_error(result, f"vLLM {NEW}")
    assert "its series changed since" in result.err
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"beta-fix": {"patched": {"failed": 1}}}, "beta-fix is broken (1 failed)"),
        ({"beta-fix": {"pristine": {}}}, "beta-fix is broken (nothing ran on the pristine tree)"),
        ({"alpha-fix": {"pristine": {"passed": 1}}}, "alpha-fix holds without its patch (native)"),
    ],
)
def test_a_broken_cell_is_an_issue_and_no_pull_request(checkout: Checkout, status: dict[str, Any], words: str) -> None:
    checkout.plan({NEW: {**REBASED[NEW], "status": status}})
    result = require_ok(checkout.night(NEW))
    assert words in result.out
    assert checkout.changes() == ["POST labels", "POST issues"]
    issue = checkout.item(1)
    assert issue["title"] == nightly_text.issue_title(Target(NEW))
    assert f"not all of it does its job there: {words}." in issue["body"]
    assert f"`ci/status.sh --base {NEW}`" in issue["body"]
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""
    require_ok(checkout.night(NEW))
    assert checkout.changes() == []
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    assert checkout.item(1)["state"] == "closed"
    assert checkout.item(2)["head"] == f"somebody:{BRANCH}"


# Upstream's own tests.


def test_the_results_of_upstreams_tests_are_committed(checkout: Checkout) -> None:
    (checkout.root / UPSTREAM_TESTS).write_text(fake_upstream.text(checkout.root, RELEASE))
    git(checkout.root, "add", UPSTREAM_TESTS)
    git(checkout.root, "commit", "-q", "-m", "Results")
    git(checkout.root, "push", "-q", "origin", "HEAD:main")
    checkout.plan(REBASED)
    require_ok(checkout.night(NEW))
    told = json.loads(checkout.branch(BRANCH)[UPSTREAM_TESTS])["bases"]
    assert {release: entry["turned"] for release, entry in told.items()} == {RELEASE: {}, NEW: {}}


def test_a_test_that_turned_is_an_issue_and_no_pull_request(checkout: Checkout) -> None:
    checkout.plan({NEW: {**REBASED[NEW], "turned": ["tests/test_a.py::test_b"]}})
    require_ok(checkout.night(NEW))
    assert "1 of upstream's own tests fail with the series" in checkout.item(1)["body"]
    assert f"ci/upstream-tests.sh --base {NEW}" in checkout.item(1)["body"]
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


def test_tests_of_upstreams_that_cannot_be_run_fail_the_run(checkout: Checkout) -> None:
    checkout.plan({NEW: {**REBASED[NEW], "turned": None}})
    result = checkout.run("rebase", NEW)
    require_error(result, f"vLLM {NEW}")
    assert "upstream's tests could not be run" in result.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told["bases"].update({RELEASE: told["bases"][NEW]}), "another release"),
        (lambda told: told["bases"][NEW].update(series_sha256="0"), "its series changed since"),
        (lambda told: told["bases"][NEW].update(more=1), "no such results"),
        (lambda told: told["bases"][NEW]["pristine"].update(more=1), "no such results"),
    ],
)
def test_results_that_are_not_of_what_is_committed(
    checkout: Checkout, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    tampered(checkout, lambda told: None)
    path = checkout.out / NEW / "upstream-tests.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    result = checkout.run("publish")
    require_error(result, f"vLLM {NEW}")
    assert words in result.err
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


@pytest.mark.parametrize("name", ["patches/status.json", "README.md"])
def test_a_checkout_without_a_table_to_add_to(checkout: Checkout, name: str) -> None:
    text = "{}" if name.endswith("json") else "# No marker\n"
    (checkout.root / name).write_text(text)
    git(checkout.root, "commit", "-q", "-a", "-m", "Break it")
    checkout.plan(REBASED)
    result = checkout.night(NEW)
    require_error(result, f"vLLM {NEW}")
    assert Path(name).name in result.err
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


# Issues.


@pytest.mark.parametrize("code", [4, 5])
def test_where_a_person_is_needed_there_is_one_issue(checkout: Checkout, code: int) -> None:
    checkout.plan({NEW: {**PERSON, "code": code}})
    require_ok(checkout.night(NEW))
    assert checkout.changes() == ["POST labels", "POST issues"]
    issue = checkout.item(1)
    assert issue["title"] == "vLLM 0.34.0: the series needs a person"
    assert issue["labels"] == ["k3-rebase"]
    assert "<<<<<<< upstream\n@decorated\n" in issue["body"]
    assert "@somebody" not in issue["body"]
    assert f"ci/rebase.sh {NEW}" in issue["body"]
    require_ok(checkout.night(NEW))
    assert checkout.changes() == []
    checkout.plan({NEW: {"code": 5, "report": "# Another\n"}})
    require_ok(checkout.night(NEW))
    assert checkout.changes() == ["PATCH issues/1"]
    assert "# Another" in checkout.item(1)["body"]


def test_the_issue_is_found_by_its_marker_or_its_title_among_many(checkout: Checkout) -> None:
    checkout.plan({NEW: PERSON, "0.34.1": PERSON, "0.34.2": PERSON, "0.34.3": PERSON})
    releases = [NEW, "0.34.1", "0.34.2", "0.34.3"]
    require_ok(checkout.night(*releases))
    checkout.item(4, title="A name of a person's")
    checkout.item(1, body="A text of a person's")
    require_ok(checkout.night(*releases))
    assert [item["title"] for item in issues(checkout)] == [
        nightly_text.issue_title(Target(release)) for release in releases
    ]


def test_an_issue_without_the_label_is_somebody_elses(checkout: Checkout) -> None:
    state = checkout.host
    alien = {"number": 1, "title": nightly_text.issue_title(Target(NEW)), "body": nightly_text.marker(Target(NEW))}
    checkout.host = {**state, "items": [{**alien, "labels": [], "state": "open", "state_reason": None}]}
    checkout.plan({NEW: PERSON})
    require_ok(checkout.night(NEW))
    assert checkout.item(1)["state"] == "open"
    assert checkout.item(2)["labels"] == ["k3-rebase"]


def test_the_issue_is_closed_when_the_release_rebases(checkout: Checkout) -> None:
    checkout.plan({NEW: PERSON})
    require_ok(checkout.night(NEW))
    checkout.plan(REBASED)
    checkout.changes()
    require_ok(checkout.night(NEW))
    assert checkout.changes()[-2:] == ["POST issues/1/comments", "PATCH issues/1"]
    issue = checkout.item(1)
    assert (issue["state"], issue["state_reason"]) == ("closed", "completed")
    assert checkout.item(2)["html_url"] in issue["comments"][0]


def test_the_issue_is_closed_when_a_person_made_the_series(checkout: Checkout) -> None:
    checkout.plan({NEW: PERSON})
    require_ok(checkout.night(NEW))
    folder = checkout.root / "patches" / f"v{NEW}"
    folder.mkdir()
    (folder / "base.toml").write_text('release = "0.34.0"\n')
    git(checkout.root, "add", "-A")
    git(checkout.root, "commit", "-q", "-m", "By hand")
    require_ok(checkout.night("main"))
    assert checkout.item(1)["state"] == "closed"
    assert checkout.item(1)["comments"] == [f"patches/v{NEW} is there now."]


def test_vllms_main_has_an_issue_and_no_branch(checkout: Checkout) -> None:
    checkout.plan({"main": PERSON})
    require_ok(checkout.night("main"))
    issue = checkout.item(1)
    main = git(checkout.upstream, "rev-parse", "main").strip()
    assert issue["title"] == "vLLM main: the series needs a person"
    assert f"ci/rebase.sh {main} --git {checkout.upstream}" in issue["body"]
    checkout.plan({"main": {"code": 0, "files": SERIES}})
    require_ok(checkout.night("main"))
    assert checkout.item(1)["state"] == "closed"
    # It needs a person again: the same issue is opened anew.
    checkout.plan({"main": PERSON})
    require_ok(checkout.night("main"))
    assert checkout.item(1)["state"] == "open"
    assert len(checkout.host["items"]) == 1
    assert git(checkout.remote, "branch", "--list").split() == ["*", "main"]


def test_an_issue_that_a_person_closed_as_not_planned_stays_closed(checkout: Checkout) -> None:
    checkout.plan({"main": PERSON})
    require_ok(checkout.night("main"))
    checkout.item(1, state="closed", state_reason="not_planned")
    checkout.changes()
    assert "not planned" in require_ok(checkout.night("main")).out
    assert checkout.changes() == []


def test_a_label_that_is_there_already(checkout: Checkout) -> None:
    checkout.host = {**checkout.host, "labels": ["k3-rebase"]}
    checkout.plan({NEW: PERSON})
    require_ok(checkout.night(NEW))
    assert len(issues(checkout)) == 1


def test_a_dry_run_changes_nothing_and_says_what_it_would(checkout: Checkout) -> None:
    checkout.plan({**REBASED, "0.34.1": PERSON})
    require_ok(checkout.run("rebase", NEW, "0.34.1"))
    git(checkout.root, "clean", "-q", "-d", "-f")
    told = require_ok(checkout.run("publish", "--dry-run")).out
    assert f"would open a pull request from {BRANCH}" in told
    assert f"to {BRANCH}" in told
    assert "would open an issue: vLLM 0.34.1" in told
    assert checkout.changes() == []
    assert git(checkout.remote, "branch", "--list", "k3-*") == ""


def test_without_gh(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout.plan({NEW: PERSON})
    require_ok(checkout.run("rebase", NEW))
    folder = tmp_path / "only-git"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    require_error(checkout.run("publish"), "gh is not installed", "GH_TOKEN")


def test_a_token_that_the_host_refuses(checkout: Checkout) -> None:
    checkout.host = {**checkout.host, "refuse": {"POST issues": "Resource not accessible by integration"}}
    checkout.plan({NEW: PERSON})
    result = checkout.night(NEW)
    require_error(result, NEW)
    assert "not accessible by integration" in result.err
    assert "permissions" in result.err


# Texts.


def test_a_report_that_is_too_long_is_cut_with_its_code_block_closed(checkout: Checkout) -> None:
    report = "# Long\n\n````diff\n" + "```\n" + "+ a line of code\n" * 10_000 + "````\n"
    checkout.plan({NEW: {"code": 4, "report": report}})
    require_ok(checkout.night(NEW))
    body = checkout.item(1)["body"]
    assert len(body) < 65536
    assert body.rstrip().endswith("````\n\n_The rest is in the run's artifact._")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@a b@c\n```\n@d\n```\n@e", "@\u200ba b@\u200bc\n```\n@d\n```\n@\u200be"),
        ("~~~~\n@a\n~~~\n```\n@b\n~~~~~\n@c", "~~~~\n@a\n~~~\n```\n@b\n~~~~~\n@\u200bc"),
        ("``` @a\n``` x\n@b\n```\n", "``` @a\n``` x\n@b\n```\n"),
    ],
)
def test_nobody_is_called(text: str, expected: str) -> None:
    assert nightly_text.quiet(text) == expected


def test_the_run_is_linked(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://host.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/k3")
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    checkout.plan({NEW: PERSON})
    require_ok(checkout.night(NEW))
    assert "https://host.example/somebody/k3/actions/runs/77" in checkout.item(1)["body"]


def test_the_script_of_the_workflow(checkout: Checkout) -> None:
    """ci/nightly.sh hands on to the commands, in an environment of its own that is there already."""
    tools = checkout.root / "build" / "tools"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "bin" / "python").chmod(0o755)
    key = '. ci/env.sh && k3_key "$PWD" ci/requirements.txt >build/tools/made-for'
    subprocess.run(["sh", "-c", key], cwd=checkout.root, check=True)
    done = subprocess.run(
        [checkout.root / "ci" / "nightly.sh", "publish"], cwd=checkout.root.parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {checkout.out} holds no outcomes")


def test_no_series_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "patches").mkdir()
    with pytest.raises(UserError, match="no series"):
        releases.missing(Project(tmp_path).releases, ["0.34.0"])
