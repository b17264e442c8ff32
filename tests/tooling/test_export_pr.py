"""Exporting a patch: what is on the branch, where it goes, what its text says, and what keeps it from being made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from exporting import (
    ALPHA,
    NOT_RUN,
    PERSON,
    clone,
    quickly,
    record,
    result,
    tree,
    use,
    with_series,
)
from k3patches.errors import UserError
from k3patches.pr import description, desk, known, place, runs
from k3patches.pr.description import Subject
from k3patches.pr.runs import Results
from k3patches.series import load
from miniature import AUTHOR, COMMITS, SPDX, Commit, Mini, Run, a_test, git, require_error, require_ok
from rebasing import CONTRACTS, write_contracts

ONE, TWO, THREE = "0001-alpha-fix", "0002-beta-fix", "0003-gamma-fix"
MOVED = {"vllm/alpha.py": ALPHA.replace("\n\ndef a", "\n\n# one\n# more\n\n\ndef a", 1)}
CONFLICT = {"vllm/alpha.py": ALPHA.replace("x + 99", "99 + x")}
RESOLVED = ALPHA.replace("x + 99", "100 + x")
NATIVE = {"vllm/alpha.py": ALPHA.replace("x + 99", "99 + 1 + x")}


@pytest.fixture(autouse=True)
def quick(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(mini, monkeypatch)
    use(mini)


def text(mini: Mini, name: str, upstream: str = "v0.27.1") -> str:
    return (result(mini, name, upstream) / "description.md").read_text()


def needs_a_person(result_: object) -> str:
    assert result_.code == PERSON, result_  # type: ignore[attr-defined]
    return str(result_.err)  # type: ignore[attr-defined]


def test_the_branch_is_the_patch_and_nothing_of_the_fork(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0001"))
    there = tree(mini, ONE)
    assert git(there, "branch", "--show-current").strip() == "k3/alpha-fix"
    assert git(there, "rev-list", "--count", "pristine..HEAD").strip() == "1"
    assert not git(there, "status", "--porcelain")
    assert git(there, "log", "-1", "--format=%an <%ae>").strip() == AUTHOR
    message = f"{COMMITS[0].subject}\n\n{COMMITS[0].body}\n\nSigned-off-by: {AUTHOR}"
    assert git(there, "log", "-1", "--format=%B").strip() == message
    names = git(there, "diff", "--name-only", "pristine", "HEAD").split()
    assert names == sorted(COMMITS[0].files)
    assert (there / "vllm" / "alpha.py").read_text() == COMMITS[0].files["vllm/alpha.py"]
    # It needs nothing of the work folder, which is gone.
    assert not (mini.build / "pr" / "work" / "v0.27.1" / ONE).exists()
    git(there, "fsck", "--strict")
    assert not mini.leftovers()


def test_the_text_tells_what_was_measured(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "alpha-fix"))
    told = text(mini, ONE)
    assert "Add the right number to alpha." in told
    # A paragraph is one line, and the trailers are not in it.
    assert "\n\nUsers saw numbers that were too small by one.\n\n" in told
    assert "Contract:" not in told
    assert "Signed-off-by" not in told
    assert "| its own tests | 1 failed | 1 passed |" in told
    assert "| `test_alpha_fix.py` | 1 failed | 1 passed |" in told
    assert "On vLLM 0.27.1 (Python 3.11.7, torch 2.13.0, no GPU)" in told
    assert "pytest -v -m cpu_test tests/test_alpha.py" in told
    assert "were not searched when this text was made" in told
    assert 'gh pr list --repo vllm-project/vllm --state open --search "alpha fix"' in told


def test_twice_is_the_same_byte_for_byte(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0001"))
    first = record(mini, ONE), text(mini, ONE)
    again = require_ok(run("export-pr", "0001"))
    assert "unchanged" in again.out
    shutil.rmtree(mini.build)
    assert "written" in require_ok(run("export-pr", "0001")).out
    assert (record(mini, ONE), text(mini, ONE)) == first


def test_a_dependency_is_refused_or_below(mini: Mini, run: Run) -> None:
    require_error(run("export-pr", "0002"), "0002-beta-fix.patch depends on", ONE, "--stack")
    assert not result(mini, TWO).exists()
    require_ok(run("export-pr", "0001"))
    require_ok(run("export-pr", "0002", "--stack"))
    # Its own pull request and the one below have the same commit.
    assert git(tree(mini, TWO), "rev-parse", "HEAD^").strip() == record(mini, ONE)["commit"]
    assert record(mini, TWO)["parent"] == record(mini, ONE)["commit"]
    told = text(mini, TWO)
    assert f"- {COMMITS[0].subject}" in told
    assert "On vLLM 0.27.1 and the change below" in told
    assert "| `test_beta_fix.py` | 1 failed | 1 passed |" in told


def test_a_dependency_that_is_not_declared(mini: Mini, run: Run) -> None:
    write_contracts(mini, CONTRACTS | {"gamma-fix": f"{CONTRACTS['gamma-fix']} and {CONTRACTS['alpha-fix']}"})
    assert "--abort and add --with NNNN" in needs_a_person(run("export-pr", "0003"))
    require_ok(run("export-pr", "0003", "--abort"))
    require_error(run("export-pr", "0001", "--with", "0003"), "0003-gamma-fix.patch does not come before 0001")
    require_ok(run("export-pr", "0003", "--with", "0001"))
    assert git(tree(mini, THREE), "rev-list", "--count", "pristine..HEAD").strip() == "2"


def test_files_of_the_fork_stay_behind(mini: Mini, run: Run) -> None:
    own = Commit(
        "alpha-fix", COMMITS[0].subject, COMMITS[0].body, dict(COMMITS[0].files) | {"k3-patches/note.md": "for us\n"}
    )
    with_series(mini, (own,))
    require_ok(run("export-pr", "0001"))
    assert "k3-patches" not in git(tree(mini, ONE), "ls-tree", "--name-only", "HEAD")
    before = (mini.series_dir / f"{ONE}.patch").read_bytes()
    (tree(mini, ONE) / "vllm" / "alpha.py").write_text(RESOLVED)
    git(tree(mini, ONE), "commit", "-q", "-a", "--amend", "--no-edit")
    require_ok(run("import-pr", "0001"))
    after = (mini.series_dir / f"{ONE}.patch").read_bytes()
    assert after != before
    assert b"+for us" in after


def test_a_patch_of_the_forks_own_files_alone_is_refused(mini: Mini, run: Run) -> None:
    with_series(mini, (Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, {"k3-patches/note.md": "for us\n"}),))
    require_error(run("export-pr", "0001"), "not for upstream")


def test_into_a_clone_that_stays_as_it_is(mini: Mini, run: Run) -> None:
    there = clone(mini, MOVED)
    before = git(there, "status", "--porcelain", "-b"), git(there, "for-each-ref"), git(there, "ls-files", "-s")
    require_ok(run("export-pr", "0001", "--onto", there, "main"))
    assert git(there, "rev-parse", "k3/alpha-fix^").strip() == git(there, "rev-parse", "main").strip()
    # Merged, not applied: upstream's lines above are there as well.
    shown = git(there, "show", "k3/alpha-fix:vllm/alpha.py")
    assert "# one" in shown
    assert "x + 100" in shown
    refs = [line for line in git(there, "for-each-ref").splitlines() if "k3/alpha-fix" not in line]
    assert (git(there, "status", "--porcelain", "-b"), "\n".join(refs) + "\n", git(there, "ls-files", "-s")) == before
    assert not (there / ".git" / "FETCH_HEAD").exists()
    told = text(mini, ONE, "v0.27.1-onto-main")
    assert "- [ ] The purpose." in told
    assert "PLEASE FILL IN" not in told
    commit = git(there, "rev-parse", "k3/alpha-fix")
    assert "unchanged" in require_ok(run("export-pr", "0001", "--onto", there, "main")).out
    assert git(there, "rev-parse", "k3/alpha-fix") == commit


def test_a_branch_of_somebody_elses_is_not_overwritten(mini: Mini, run: Run) -> None:
    there = clone(mini)
    git(there, "branch", "k3/alpha-fix")
    require_error(
        run("export-pr", "0001", "--onto", there, "then"), "k3/alpha-fix", "not exported from here", "--branch"
    )
    require_ok(run("export-pr", "0001", "--onto", there, "then", "--branch", "other"))
    # Its owner goes on with it.
    git(there, "stash", "-q")
    git(there, "checkout", "-q", "other")
    git(there, "commit", "-q", "--allow-empty", "-m", "more")
    require_error(run("export-pr", "0001", "--onto", there, "then", "--branch", "other"), "checked out in")
    git(there, "checkout", "-q", "mine")
    require_error(run("export-pr", "0001", "--onto", there, "then", "--branch", "other"), "changed since")


def test_a_branch_from_here_follows_the_patch(mini: Mini, run: Run) -> None:
    there = clone(mini)
    require_ok(run("export-pr", "0001", "--onto", there, "then"))
    old = git(there, "rev-parse", "k3/alpha-fix")
    changed = dict(COMMITS[0].files) | {"vllm/alpha.py": RESOLVED}
    with_series(mini, (Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, changed),))
    require_ok(run("export-pr", "0001", "--onto", there, "then"))
    assert git(there, "rev-parse", "k3/alpha-fix") != old
    assert git(there, "show", "k3/alpha-fix:vllm/alpha.py") == RESOLVED


def test_a_shallow_clone(mini: Mini, run: Run) -> None:
    full = clone(mini, MOVED)
    git(mini.root, "clone", "-q", "--depth", "1", "-b", "main", full.as_uri(), "shallow")
    require_ok(run("export-pr", "0001", "--onto", mini.root / "shallow", "main"))
    assert git(mini.root / "shallow", "rev-list", "--count", "main..k3/alpha-fix").strip() == "1"


def test_what_upstream_has_by_itself(mini: Mini, run: Run) -> None:
    there = clone(mini, NATIVE)
    require_error(run("export-pr", "0001", "--onto", there, "main"), "alpha-fix by itself", "nothing to export")
    # Neither is it needed below another.
    require_ok(run("export-pr", "0002", "--onto", there, "main"))
    assert git(there, "rev-list", "--count", "main..k3/beta-fix").strip() == "1"
    assert not list((mini.build / "pr" / "work").rglob("*.py"))


def test_a_conflict(mini: Mini, run: Run) -> None:
    there = clone(mini, CONFLICT)
    err = needs_a_person(run("export-pr", "0001", "--onto", there, "main"))
    assert "vllm/alpha.py: both changed it, 1 hunks" in err
    work = mini.build / "pr" / "work" / "v0.27.1-onto-main" / ONE / "tree"
    assert f"edit it in {work.relative_to(mini.root)}" in err
    assert f"--onto {there} main --continue" in err
    merged = (work / "vllm" / "alpha.py").read_text()
    assert "<<<<<<< upstream\n" in merged
    assert ">>>>>>> 0001-alpha-fix.patch of vLLM 0.27.1\n" in merged
    assert "k3/alpha-fix" not in git(there, "for-each-ref")
    # It waits, and says so; half an edit is not taken.
    assert "--continue" in needs_a_person(run("export-pr", "0001", "--onto", there, "main"))
    assert "conflict marker" in needs_a_person(run("export-pr", "0001", "--onto", there, "main", "--continue"))
    (work / "vllm" / "alpha.py").write_text(RESOLVED)
    require_ok(run("export-pr", "0001", "--onto", there, "main", "--continue"))
    assert git(there, "show", "k3/alpha-fix:vllm/alpha.py") == RESOLVED
    commit = git(there, "rev-parse", "k3/alpha-fix")
    # The same export needs nobody any more.
    git(there, "branch", "-q", "-D", "k3/alpha-fix")
    shutil.rmtree(result(mini, ONE, "v0.27.1-onto-main"))
    require_ok(run("export-pr", "0001", "--onto", there, "main"))
    assert git(there, "rev-parse", "k3/alpha-fix") == commit
    # What a person did of another clone is not for everybody.
    assert not (mini.root / "patches" / "pr" / "v0.27.1").exists()


def test_abort_leaves_nothing(mini: Mini, run: Run) -> None:
    there = clone(mini, CONFLICT)
    needs_a_person(run("export-pr", "0001", "--onto", there, "main"))
    require_ok(run("export-pr", "0001", "--onto", there, "main", "--abort"))
    assert not list((mini.build / "pr").rglob("tree"))
    require_error(run("export-pr", "0001", "--onto", there, "main", "--abort"), "nothing to abort")
    require_error(run("export-pr", "0001", "--onto", there, "main", "--continue"), "start one without --continue")


def test_a_resolution_on_the_release_itself_is_for_everybody(mini: Mini, run: Run) -> None:
    # A patch whose lines are beside those of another that it does not depend on.
    first = Commit(
        "gamma-fix",
        COMMITS[2].subject,
        COMMITS[2].body,
        {"tests/test_gamma.py": a_test("gamma"), "vllm/gamma.py": COMMITS[2].files["vllm/gamma.py"]},
    )
    base = str(COMMITS[2].files["vllm/gamma.py"])
    files = {
        "tests/test_alpha.py": a_test("alpha"),
        "vllm/gamma.py": base.replace("x - 98", "x - 98  # same"),
        "vllm/alpha.py": COMMITS[0].files["vllm/alpha.py"],
    }
    with_series(mini, (first, Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, files)))
    needs_a_person(run("export-pr", "0002"))
    work = mini.build / "pr" / "work" / "v0.27.1" / "0002-alpha-fix" / "tree"
    git(work, "checkout", "-q", "HEAD", "--", "vllm/gamma.py")
    require_ok(run("export-pr", "0002", "--continue"))
    commit = record(mini, "0002-alpha-fix")["commit"]
    assert (mini.root / "patches" / "pr" / "v0.27.1" / "alpha-fix.patch").is_file()
    shutil.rmtree(mini.build)
    require_ok(run("export-pr", "0002"))
    assert record(mini, "0002-alpha-fix")["commit"] == commit


@pytest.mark.parametrize("what", ["contract", "tests", "format"])
def test_a_branch_that_is_not_good_is_not_made(mini: Mini, run: Run, what: str) -> None:
    files = dict(COMMITS[0].files)
    if what == "contract":
        write_contracts(mini, {"alpha-fix": "False"})
    elif what == "tests":
        files["tests/test_alpha.py"] = a_test("alpha") + "\n\n# cannot pass\n"
    else:
        files["tests/test_alpha.py"] = a_test("alpha").replace("assert True", "assert (True )")
    if what != "contract":
        with_series(mini, (Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, files),))
    err = needs_a_person(run("export-pr", "0001"))
    word = {
        "contract": "its contract alpha-fix does not hold",
        "tests": "its own tests fail",
        "format": "not formatted",
    }
    assert word[what] in err
    assert not result(mini, ONE).exists()
    if what == "contract":
        return
    # The person mends it as a commit of the same patch.
    work = mini.build / "pr" / "work" / "v0.27.1" / ONE / "tree"
    (work / "tests" / "test_alpha.py").write_text(a_test("alpha"))
    assert "is changed and not committed" in needs_a_person(run("export-pr", "0001", "--continue"))
    git(work, "commit", "-q", "-a", "--amend", "--no-edit")
    require_ok(run("export-pr", "0001", "--continue"))
    assert "cannot" not in git(tree(mini, ONE), "show", "HEAD")
    # The date of the mending is nowhere in it.
    assert git(tree(mini, ONE), "log", "-1", "--format=%cI") == git(tree(mini, ONE), "log", "-1", "--format=%aI")


def test_without_an_environment(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(python: str) -> dict[str, str]:
        raise UserError(f"{python} cannot run contracts (no torch)")

    monkeypatch.setattr(desk, "interpreter", none)
    done = run("export-pr", "0001", "--python", "python9")
    assert done.code == NOT_RUN
    assert "neither tests nor contracts were run" in done.err
    assert "**Neither the tests nor the behaviour tests were run**: python9 cannot run contracts (no torch)" in text(
        mini, ONE
    )
    assert " passed" not in text(mini, ONE)
    assert run("export-pr", "0001", "--no-runs").code == NOT_RUN
    assert "--no-runs" in text(mini, ONE)


def test_tests_that_prove_nothing_are_told_of(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_tests", lambda *_: runs.Tests(passed=2, deselected=1))
    require_ok(run("export-pr", "0001"))
    assert "| its own tests | 2 passed, 1 for a GPU not run | 2 passed, 1 for a GPU not run |" in text(mini, ONE)
    assert "The change's own tests pass without it as well." in text(mini, ONE)


def test_work_in_the_result_is_not_lost(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0001"))
    (tree(mini, ONE) / "vllm" / "alpha.py").write_text("edited\n")
    require_error(run("export-pr", "0001"), "work that is in no patch yet", "import-pr.sh")
    git(tree(mini, ONE), "commit", "-q", "-a", "-m", "edited")
    require_error(run("export-pr", "0001"), "work that is in no patch yet")
    assert (tree(mini, ONE) / "vllm" / "alpha.py").read_text() == "edited\n"


def test_whole_or_not_at_all(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ok(run("export-pr", "0001"))
    before = {p: p.read_bytes() for p in result(mini, ONE).rglob("*.*") if p.is_file() and ".git" not in p.parts}
    changed = dict(COMMITS[0].files) | {"vllm/alpha.py": RESOLVED}
    with_series(mini, (Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, changed),))

    def stops(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(place.Exported, "text", stops)
        assert run("export-pr", "0001").code == 1
    assert {p: p.read_bytes() for p in before} == before
    require_ok(run("export-pr", "0001"))
    assert (tree(mini, ONE) / "vllm" / "alpha.py").read_text() == RESOLVED


def test_all_of_them(mini: Mini, run: Run, tmp_path: Path) -> None:
    """In the order in which they are best sent: of two that do as much harm, the smaller first."""
    require_ok(run("export-pr", "--all", "--json", tmp_path / "all.json"))
    rows = json.loads((tmp_path / "all.json").read_text())["patches"]
    assert [(row["patch"], row["code"], row["below"], row["format"]) for row in rows] == [
        (f"{ONE}.patch", 0, 0, "ok"),
        (f"{THREE}.patch", 0, 0, "ok"),
        (f"{TWO}.patch", 0, 1, "ok"),
    ]
    assert all(row["contracts"] == ["1 failed", "1 passed"] for row in rows)


def test_one_of_all_that_fails_stops_no_other(mini: Mini, run: Run) -> None:
    there = clone(mini, CONFLICT)
    done = run("export-pr", "--all", "--onto", there, "main")
    assert done.code == PERSON
    assert "exit code 4" in done.out
    assert "0002-beta-fix.patch: it depends on 0001-alpha-fix.patch, which is to be exported first" in done.err
    assert "both changed it" in done.err
    assert "k3/gamma-fix" in git(there, "for-each-ref")
    assert "k3/beta-fix" not in git(there, "for-each-ref")


def test_a_check_of_all_leaves_nothing(mini: Mini, run: Run, tmp_path: Path) -> None:
    there = clone(mini, MOVED)
    before = git(there, "for-each-ref"), sorted(mini.series_dir.iterdir())
    for onto in ((), ("--onto", there, "main")):
        require_ok(run("export-pr", "--all", "--check", "--json", tmp_path / "check.json", *onto))
        rows = json.loads((tmp_path / "check.json").read_text())["patches"]
        assert [row["trip"] for row in rows] == ["only the edit"] * 3
    assert (git(there, "for-each-ref"), sorted(mini.series_dir.iterdir())) == before
    assert not list((mini.build / "pr").rglob("description.md"))


def test_a_check_edits_where_no_later_patch_does(mini: Mini, run: Run, tmp_path: Path) -> None:
    # The second patch changes a line right beside where the first one's addition begins.
    again = str(COMMITS[0].files["vllm/alpha.py"]).replace("x + 100", "x + 100  # again", 1)
    alpha = dict(COMMITS[0].files) | {"tests/test_alpha.py": a_test("alpha")}
    later = Commit("gamma-fix", COMMITS[2].subject, COMMITS[2].body, dict(COMMITS[2].files) | {"vllm/alpha.py": again})
    with_series(mini, (Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, alpha), later))
    done = run("export-pr", "--all", "--check", "--json", tmp_path / "check.json")
    first, second = json.loads((tmp_path / "check.json").read_text())["patches"]
    assert first["trip"] == "only the edit; line numbers and blob ids of 0002", done.err
    # What cannot be merged alone is one's that needs a person, and the other is tried all the same.
    assert second["code"] == PERSON


def test_what_upstreams_own_scripts_find(mini: Mini, run: Run) -> None:
    script = "import sys\n\nprint(f'\\x1b[91m{sys.argv[1]}:1: no such call')\nraise SystemExit(1)\n"
    there = clone(mini, {"tools/pre_commit/check_torch_cuda.py": script})
    done = require_ok(run("export-pr", "0001", "--onto", there, "main"))
    assert "left to do for upstream's pre-commit: check_torch_cuda.py: tests/test_alpha.py:1: no such call" in done.err
    assert "- check_torch_cuda.py: tests/test_alpha.py:1: no such call\n" in text(mini, ONE, "v0.27.1-onto-main")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0009",), ("no patch 0009", "0001-alpha-fix")),
        (("0001", "--base", "0.26.0"), ("no series for vLLM 0.26.0",)),
        (("0001", "--onto", "nowhere", "main"), ("nowhere is no git repository",)),
        (("0001", "--onto", "upstream", "nope"), ("no commit nope",)),
        (("0001", "--onto", "empty", "main"), ("holds no vLLM source",)),
    ],
)
def test_errors_of_one_sentence(mini: Mini, run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    empty = mini.root / "empty"
    empty.mkdir()
    git(empty, "init", "-q", ".")
    git(empty, "commit", "-q", "--allow-empty", "-m", "x")
    require_error(run("export-pr", *arguments), *words)


@pytest.mark.parametrize(
    "arguments",
    [(), ("0001", "--all"), ("--all", "--branch", "b"), ("0001", "--check"), ("0001", "--continue", "--abort")],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("export-pr", *arguments).code == 2


def subject(mini: Mini, ground: dict[str, known.Ground] | None = None) -> Subject:
    contracts = mini.root / "tests" / "contracts"
    return Subject(load(mini.series_dir)[0], [], "vLLM main (0123456789ab)", contracts, ground or {})


LATER = """\
<!-- markdownlint-disable -->

## Overview

<!-- Summarize the change in 1-2 lines. -->

## Claims

<!-- A few bullets. -->

## Validation

## Details

<!-- Explain. -->

## Something new

<!-- Not known here. -->

---

<details>
- [ ] AI assistance was used during the creation of this PR.
</details>
"""


def test_a_later_template(mini: Mini) -> None:
    results = Results(without="nobody ran it", test_files=["tests/test_alpha.py"], unformatted=[])
    told, unknown = description.render(LATER, subject(mini), results)
    assert unknown == ["Something new"]
    headings = [line for line in told.splitlines() if line.startswith("## ")]
    assert headings == ["## Overview", "## Claims", "## Validation", "## Details", "## Something new"]
    assert "<!-- Summarize" not in told
    assert "<!-- Not known here. -->" in told
    # What only a person can say is left to one.
    assert "- [ ] AI assistance was used during the creation of this PR." in told
    assert told.index("nobody ran it") > told.index("## Validation")


def test_a_template_that_nothing_is_known_of(mini: Mini) -> None:
    told, unknown = description.render("# Hello\n", subject(mini), Results(without="x"))
    assert not unknown
    assert "## Test Result" in told


def test_known_pull_requests_are_listed(mini: Mini) -> None:
    folder = mini.root / "patches" / "pr"
    folder.mkdir(exist_ok=True)
    (folder / "known.toml").write_text(
        '[alpha-fix]\npull.7 = "the same"\nissue.8 = "a report"\nsearch = ["letter c"]\n'
    )
    told, _ = description.render("", subject(mini, known.load(folder)), Results(without="x"))
    assert "- https://github.com/vllm-project/vllm/pull/7: the same" in told
    assert "- https://github.com/vllm-project/vllm/issues/8: a report" in told
    assert 'gh issue list --repo vllm-project/vllm --state open --search "letter c"' in told
    (folder / "known.toml").write_text("[alpha-fix\n")
    with pytest.raises(UserError, match="not as it should be"):
        known.load(folder)


def test_the_known_ones_are_of_fixes_that_there_are() -> None:
    root = Path(__file__).resolve().parents[2]
    fixes = {f"test_{fix.replace('-', '_')}.py" for fix in known.load(root / "patches" / "pr")}
    assert fixes <= {path.name for path in (root / "tests" / "contracts").glob("test_*.py")}


def test_a_real_run_of_tests(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "tests").mkdir()
    head = SPDX + "import pytest\n\npytestmark = pytest.mark.cpu_test\n\n\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cpu_test\n")
    (tmp_path / "tests" / "test_one.py").write_text(
        head + "def test_a():\n    pass\n\n\ndef test_b():\n    assert False\n\n\ndef test_c():\n    pytest.skip('x')\n"
    )
    (tmp_path / "tests" / "test_two.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "tests" / "test_three.py").write_text("def test_on_a_gpu():\n    pass\n")
    import sys

    names = ["tests/test_one.py", "tests/test_two.py", "tests/test_three.py"]
    found = runs._tests(names, tmp_path, sys.executable, tmp_path / "log")
    assert found == runs.Tests(passed=1, failed=1, skipped=1, not_importable=1, deselected=1)
    assert not found.ok


def test_two_exports_of_one_base(mini: Mini, run: Run) -> None:
    from filelock import FileLock

    (mini.build / "pr").mkdir(parents=True)
    with FileLock(mini.build / "pr" / ".v0.27.1.lock"):
        require_error(run("export-pr", "0001"), "another export or import of vLLM 0.27.1 is running")
