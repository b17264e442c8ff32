"""Patches edited as commits: opened, written back whole or not at all, and nothing lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from k3patches.project import Project
from k3patches.work.after import next_steps
from miniature import (
    COMMITS,
    PATCHES,
    SOURCE,
    SPDX,
    Commit,
    Mini,
    Result,
    Run,
    a_test,
    commit,
    git,
    message,
    require_error,
    require_ok,
)
from patchwork import NOTHING, PERSON, WRITTEN, amend, carried, edit_dir, opened, quickly, replace, written
from rebasing import CONTRACTS, later, write_contracts
from rebasing import quickly as with_index

DELTA = Commit(
    "delta-fix",
    "[Bugfix] Keep what delta is",
    "delta.py was not there.\n\nUsers saw an ImportError.\n\ndelta.py is added.",
    {"vllm/delta.py": SPDX + "\nDELTA = True\n", "tests/test_delta.py": a_test("delta")},
)
TOO = message(COMMITS[0]).replace("now adds 100.", "now adds 100; gamma.py too.")


@pytest.fixture(autouse=True)
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    name = "built" if "built" in request.fixturenames else "mini"
    yield from quickly(request.getfixturevalue(name), monkeypatch)


def subjects(tree: Path, which: str = "HEAD") -> list[str]:
    return git(tree, "log", "--reverse", "--format=%s", f"pristine..{which}").splitlines()


def require(result: Result, code: int, *words: str) -> Result:
    assert result.code == code, (result.code, result.err, result.out)
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err + result.out, (word, result.err, result.out)
    return result


def mail(mini: Mini, name: str) -> str:
    return (mini.series_dir / name).read_text()


def names(mini: Mini) -> list[str]:
    return sorted(p.name for p in mini.series_dir.glob("*.patch"))


def require_closed(mini: Mini) -> None:
    assert not edit_dir(mini).exists()
    assert [p for p in mini.leftovers() if "edit" not in p.parts] == []
    assert sorted(p.name for p in (mini.build / "edit").iterdir() if not p.name.startswith(".lock")) in (
        [".store.lock", "outcomes", "store.git"],
        [".store.lock", "store.git"],
    )


@pytest.mark.parametrize("wanted", ["0002", "beta-fix", "0002-beta-fix.patch"])
def test_the_series_opens_at_a_patch(mini: Mini, run: Run, wanted: str) -> None:
    told = require_ok(run("edit", wanted))
    tree = opened(mini)
    assert told.out == f"{tree}\n"
    assert "1 later patches set aside" in told.err
    assert subjects(tree) == [c.subject for c in COMMITS[:2]]
    assert subjects(tree, "series") == [c.subject for c in COMMITS]
    assert git(tree, "status", "--porcelain", "--ignored") == ""
    assert git(tree, "show", "pristine:vllm/_version.py") == SOURCE["vllm/_version.py"]


@pytest.mark.parametrize("number", ["0001", "0002", "0003"])
def test_an_edit_that_changes_nothing_changes_no_byte(mini: Mini, run: Run, ran: list[list[str]], number: str) -> None:
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in mini.series_dir.iterdir()}
    require_ok(run("edit", number))
    git(opened(mini), "commit", "-q", "--amend", "--no-edit", "--allow-empty")
    require(run("write-back"), NOTHING, "nothing to do")
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in mini.series_dir.iterdir()} == before
    assert ran == []
    require_closed(mini)


def test_an_amended_patch(mini: Mini, run: Run, ran: list[list[str]]) -> None:
    before = written(mini)
    require_ok(run("edit", "0001"))
    amend(opened(mini), "vllm/alpha.py", "x + 100", "100 + x")
    told = require(run("write-back"), WRITTEN, f"patches/v0.27.1/{PATCHES[0]}: the edit", "ci/status.sh")
    assert told.out.count("\n") == 1
    assert "alpha-fix without" in told.err
    assert {n for n, data in written(mini).items() if data != before.get(n)} == {f"patches/v0.27.1/{PATCHES[0]}"}
    assert "+    return 100 + x" in mail(mini, PATCHES[0])
    assert "Date: Sun, 1 Nov 2026 12:00:00 +0000" in mail(mini, PATCHES[0])
    assert ran == [[PATCHES[0]]]
    require_closed(mini)
    require_ok(run("lint"))
    # Taking it back gives the bytes of before.
    require_ok(run("edit", "0001"))
    amend(opened(mini), "vllm/alpha.py", "100 + x", "x + 100")
    require(run("write-back"), WRITTEN)
    assert written(mini) == before


def test_what_is_not_committed_is_refused_or_folded(mini: Mini, run: Run) -> None:
    before = written(mini)
    require_ok(run("edit", "0001"))
    replace(opened(mini) / "vllm" / "alpha.py", "x + 100", "100 + x")
    (opened(mini) / "tests" / "test_more.py").write_text(a_test("more"))
    require_error(run("write-back"), "vllm/alpha.py is in no commit", "--amend")
    assert written(mini) == before
    assert "100 + x" in (opened(mini) / "vllm" / "alpha.py").read_text()
    require(run("write-back", "--amend"), WRITTEN)
    assert "tests/test_more.py" in mail(mini, PATCHES[0])
    assert "+    return 100 + x" in mail(mini, PATCHES[0])
    assert "Add the right number to alpha" in mail(mini, PATCHES[0])


def test_a_patch_more_in_between(mini: Mini, run: Run, ran: list[list[str]]) -> None:
    write_contracts(mini, CONTRACTS | {"delta-fix": 'there("delta")'})
    require_ok(run("edit", "0001"))
    commit(opened(mini), DELTA.files, message(DELTA))
    told = require(
        run("write-back"), WRITTEN, "0002-delta-fix.patch: new", "0003-beta-fix.patch: was 0002-beta-fix.patch"
    )
    assert "delta-fix without 0002-delta-fix.patch: 1 failed" in told.err
    assert names(mini) == [PATCHES[0], "0002-delta-fix.patch", "0003-beta-fix.patch", "0004-gamma-fix.patch"]
    assert ran == [["0002-delta-fix.patch"]]
    require_ok(run("lint"))


def test_later_patches_are_merged_on_top(mini: Mini, run: Run, ran: list[list[str]]) -> None:
    require_ok(run("edit", "0001"))
    tree = opened(mini)
    replace(tree / "vllm" / "gamma.py", "\n\ndef a", "\n\n# one\n# more\n\n\ndef a")
    replace(tree / "vllm" / "alpha.py", "x + 100", "100 + x")
    git(tree, "commit", "-q", "-a", "--amend", "-m", TOO)
    told = require(run("write-back"), WRITTEN, f"{PATCHES[2]}: line numbers and blob ids")
    assert "gamma-fix without" not in told.err
    assert "  gamma-fix: 1 passed" in told.err
    assert ran == [[PATCHES[0]]]
    require_ok(run("lint"))


def conflicting(mini: Mini, run: Run) -> dict[str, bytes]:
    """An edit of the first patch that the third one does not fit on; what is written before it."""
    before = written(mini)
    require_ok(run("edit", "0001"))
    tree = opened(mini)
    replace(tree / "vllm" / "gamma.py", "x + 98", "98 + x")
    git(tree, "commit", "-q", "-a", "--amend", "-m", TOO)
    require(run("write-back"), PERSON, PATCHES[2], "build/edit/v0.27.1/carry/tree", "--continue", "--abort")
    assert written(mini) == before
    return before


def test_a_conflict(mini: Mini, run: Run) -> None:
    conflicting(mini, run)
    path = carried(mini) / "vllm" / "gamma.py"
    text = path.read_text()
    assert "<<<<<<< the edit" in text
    assert f">>>>>>> {PATCHES[2]}" in text
    # The person's own tree is as it was.
    assert git(opened(mini), "status", "--porcelain") == ""
    assert subjects(opened(mini)) == [COMMITS[0].subject]
    require(run("write-back"), PERSON, "--continue", "--abort")
    require(run("write-back", "--continue"), PERSON, "still is a conflict marker")
    path.write_text(SOURCE["vllm/gamma.py"].replace("x + 98", "x - 98"))
    told = require(run("write-back", "--continue"), WRITTEN, f"{PATCHES[2]}: the edit")
    assert "gamma-fix without" in told.err
    assert "-    return 98 + x" in mail(mini, PATCHES[2])
    require_ok(run("lint"))
    require_closed(mini)


def test_a_conflict_is_called_off(mini: Mini, run: Run) -> None:
    before = conflicting(mini, run)
    require_ok(run("write-back", "--abort"))
    assert "98 + x" in (opened(mini) / "vllm" / "gamma.py").read_text()
    amend(opened(mini), "vllm/gamma.py", "98 + x", "x + 98")
    git(opened(mini), "commit", "-q", "--amend", "-m", message(COMMITS[0]))
    require(run("write-back"), NOTHING)
    assert written(mini) == before
    require_error(run("write-back", "--abort"), "no edit")


def test_a_patch_left_out_must_not_be_needed(mini: Mini, run: Run) -> None:
    before = conflicting(mini, run)
    git(carried(mini), "cherry-pick", "--skip")
    require(run("write-back", "--continue"), PERSON, "gamma-fix does not hold, and no patch is for it any more")
    assert written(mini) == before
    # With the fix in the other patch, it may go.
    replace(carried(mini) / "vllm" / "gamma.py", "98 + x", "x - 98")
    git(carried(mini), "commit", "-q", "-a", "--fixup", "HEAD~1")
    git(carried(mini), "-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", "pristine")
    require(run("write-back", "--continue"), WRITTEN, f"{PATCHES[2]}: removed")
    assert names(mini) == list(PATCHES[:2])


def test_the_edit_must_stay_while_a_conflict_waits(mini: Mini, run: Run) -> None:
    conflicting(mini, run)
    amend(opened(mini), "vllm/alpha.py", "x + 100", "100 + x")
    (carried(mini) / "vllm" / "gamma.py").write_text(SOURCE["vllm/gamma.py"].replace("x + 98", "x - 98"))
    require_error(run("write-back", "--continue"), "was changed while", "--abort")
    assert "x - 98" in (carried(mini) / "vllm" / "gamma.py").read_text()


@pytest.mark.parametrize(
    ("path", "old", "new", "words"),
    [
        ("vllm/alpha.py", "x + 100", "x + 101", ["alpha-fix does not hold, with the series"]),
        ("vllm/alpha.py", "x + 100", "x +100", ["lint has the findings"]),
        ("vllm/alpha.py", "x + 100", "x + (", ["lint has the findings"]),
        ("tests/test_alpha.py", "assert True", "assert False", ["tests that the patches carry fail"]),
    ],
)
def test_what_is_wrong_is_not_written(mini: Mini, run: Run, path: str, old: str, new: str, words: list[str]) -> None:
    before = written(mini)
    require_ok(run("edit", "0001"))
    amend(opened(mini), path, old, new)
    require_error(run("write-back"), "nothing is written", *words, "run ci/refresh.sh again")
    assert written(mini) == before
    assert not carried(mini).exists()
    amend(opened(mini), path, new, old)
    require(run("write-back"), NOTHING)


def test_a_contract_that_holds_without_the_patch_is_found(mini: Mini, run: Run) -> None:
    write_contracts(mini, CONTRACTS | {"alpha-fix": 'there("alpha")'})
    require_ok(run("edit", "0001"))
    amend(opened(mini), "vllm/alpha.py", "x + 100", "100 + x")
    require_error(run("write-back"), f"alpha-fix holds without {PATCHES[0]}")
    require(run("write-back", "--no-runs"), WRITTEN)


def test_a_commit_for_no_fix_and_two_for_one(mini: Mini, run: Run) -> None:
    before = written(mini)
    require_ok(run("edit", "0003"))
    commit(opened(mini), {"vllm/kept.py": "# work\n"}, "fixup! something")
    require_error(run("write-back"), "fixup! something", "no Contract trailer")
    git(opened(mini), "commit", "-q", "--amend", "-m", message(COMMITS[0]))
    require_error(run("write-back"), "two patches are for alpha-fix", "squash")
    assert written(mini) == before
    assert subjects(opened(mini))[-1] == COMMITS[0].subject


def test_the_whole_series_is_there_for_an_ordinary_rebase(mini: Mini, run: Run) -> None:
    """Earlier patches are edited, and the order is changed, from the last one."""
    require_ok(run("edit", "0003"))
    tree = opened(mini)
    replace(tree / "vllm" / "alpha.py", "x + 100", "100 + x")
    git(tree, "commit", "-q", "-a", "--fixup", ":/Add the right number")
    git(tree, "-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", "pristine")
    git(tree, "checkout", "-q", "--detach", "HEAD~2")
    git(tree, "cherry-pick", "main", "main~1")
    require(run("write-back"), WRITTEN)
    assert names(mini) == [PATCHES[0], "0002-gamma-fix.patch", "0003-beta-fix.patch"]
    assert "+    return 100 + x" in mail(mini, PATCHES[0])
    require_ok(run("lint"))


def test_one_edit_at_a_time(mini: Mini, run: Run) -> None:
    require_ok(run("edit", "0001"))
    (opened(mini) / "vllm" / "alpha.py").write_text("# three days of work\n")
    for command in (("edit", "0002"), ("edit", "--quilt"), ("new", "new-fix", "--subject", "[Bugfix] Mend something")):
        require_error(run(*command), "holds an edit of 0001-alpha-fix.patch", "ci/refresh.sh", "ci/edit.sh --abort")
    assert (opened(mini) / "vllm" / "alpha.py").read_text() == "# three days of work\n"
    require_ok(run("edit", "--abort"))
    require_closed(mini)
    require_ok(run("edit", "0002"))


def test_words_for_what_cannot_be(mini: Mini, run: Run) -> None:
    require_error(run("edit", "0009"), "no patch 0009", "0001-alpha-fix")
    require_error(run("edit", "0001", "--base", "0.26.0"), "no series for vLLM 0.26.0")
    require_error(run("edit"), "name one patch")
    for arguments in (("write-back",), ("write-back", "--continue"), ("write-back", "--abort"), ("edit", "--abort")):
        require_error(run(*arguments), "no edit of vLLM 0.27.1 is open", "ci/edit.sh NNNN")
    require_ok(run("edit", "0001"))
    require_error(run("write-back", "--continue"), "waits for anybody")
    tree = opened(mini)
    git(tree, "checkout", "-q", "-b", "side", "pristine")
    commit(tree, {"vllm/kept.py": "# side\n"}, "side")
    git(tree, "checkout", "-q", "main")
    git(tree, "merge", "-q", "--no-edit", "side")
    require_error(run("write-back"), "has a merge")
    git(tree, "reset", "-q", "--hard", "HEAD^")
    git(tree, "checkout", "-q", "--orphan", "other")
    git(tree, "commit", "-q", "-m", "other")
    require_error(run("write-back"), "is no git tree on vLLM 0.27.1's source any more")
    (edit_dir(mini) / "edit.json").write_text("{")
    require_error(run("write-back"), "damaged", "--abort")


def test_a_series_that_changed_meanwhile_is_not_overwritten(mini: Mini, run: Run) -> None:
    require_ok(run("edit", "0001"))
    amend(opened(mini), "vllm/alpha.py", "x + 100", "100 + x")
    replace(mini.series_dir / PATCHES[2], "Users saw numbers", "People saw numbers")
    before = written(mini)
    require_error(run("write-back"), "changed since", "format-patch")
    assert written(mini) == before
    assert "100 + x" in (opened(mini) / "vllm" / "alpha.py").read_text()


def test_what_else_a_folder_holds_stays(mini: Mini, run: Run) -> None:
    (mini.series_dir / "notes").mkdir()
    (mini.series_dir / "notes" / "why.md").write_text("because\n")
    require_ok(run("edit", "0001"))
    amend(opened(mini), "vllm/alpha.py", "x + 100", "100 + x")
    require(run("write-back"), WRITTEN)
    assert (mini.series_dir / "notes" / "why.md").read_text() == "because\n"
    assert (mini.series_dir / "series").read_text().startswith("# the series of the miniature\n")


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(number=st.integers(1, 3), edits=st.dictionaries(st.sampled_from("aefghij"), st.integers(200, 999), min_size=1))
def test_any_edit_there_and_back(mini: Mini, run: Run, number: int, edits: dict[str, int]) -> None:
    """Only the edit goes into the series, whichever patch it is of; and taken back it leaves no trace."""
    before = written(mini)
    lines = [(f"return x + {ord(name)}\n", f"return x + {value}\n") for name, value in edits.items()]
    text = message(COMMITS[number - 1])
    for there in (True, False):
        require_ok(run("edit", f"{number:04d}"))
        tree = opened(mini)
        for old, new in lines:
            replace(tree / "vllm" / "alpha.py", *((old, new) if there else (new, old)))
        named = text.replace("\n\nContract:", "\n\nalpha.py too.\n\nContract:") if there else text
        git(tree, "commit", "-q", "-a", "--amend", "-m", named)
        require(run("write-back", "--no-runs"), WRITTEN)
        added = [line[1:] for line in mail(mini, PATCHES[number - 1]).splitlines() if line.startswith("+")]
        assert all((new.rstrip("\n") in "\n".join(added)) is there for _, new in lines)
    assert written(mini) == before


def test_what_is_to_be_done_next(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextmanager(with_index)(mini, monkeypatch):
        later(mini, "0.28.0", {})
        later(mini, "0.29.0", {"vllm/alpha.py": SOURCE["vllm/alpha.py"].replace("x + 99", "99 + 1 + x")})
        require(run("rebase", "0.28.0"), 0)
        require(run("rebase", "0.29.0"), 0)
        project = Project(mini.root)

        def steps(release: str, *fixes: str) -> list[str]:
            return [command for command, _ in next_steps(project, release, set(fixes))]

        # Native on 0.29.0; and what 0.28.0 takes over, 0.29.0 takes from there.
        assert steps("0.27.1", "alpha-fix") == ["ci/rebase.sh 0.28.0", "ci/status.sh"]
        assert steps("0.27.1", "gamma-fix") == ["ci/rebase.sh 0.28.0", "ci/rebase.sh 0.29.0", "ci/status.sh"]
        assert steps("0.28.0", "gamma-fix") == ["ci/rebase.sh 0.28.0 --record", "ci/rebase.sh 0.29.0", "ci/status.sh"]
        assert steps("0.29.0", "gamma-fix") == ["ci/rebase.sh 0.29.0 --record", "ci/status.sh"]
        # It is true: after these steps, and no others, a rebase has nothing left to do.
        require_ok(run("edit", "0003", "--base", "0.28.0"))
        tree = mini.build / "edit" / "v0.28.0" / "tree"
        amend(tree, "vllm/gamma.py", "x - 98", "-98 + x")
        require(run("write-back"), WRITTEN, "ci/rebase.sh 0.28.0 --record", "ci/rebase.sh 0.29.0 ")
        require(run("rebase", "0.28.0", "--record"), 0)
        require(run("rebase", "0.29.0"), 0)
        for release in ("0.28.0", "0.29.0"):
            require(run("rebase", release), NOTHING)
            folder = mini.root / "patches" / f"v{release}"
            assert any("+    return -98 + x" in p.read_text() for p in folder.glob("*gamma-fix.patch"))


def test_apply_takes_a_tree_that_was_written_back(built: Mini, run: Run) -> None:
    tree = built.tree
    git(tree, "commit", "-q", "--amend", "-m", message(COMMITS[2]).replace("Users saw numbers", "People saw numbers"))
    require_error(run("apply"), "save them")
    require_ok(run("refresh", tree))
    head, inode = git(tree, "rev-parse", "HEAD"), tree.stat().st_ino
    require_ok(run("apply"))
    assert (git(tree, "rev-parse", "HEAD"), tree.stat().st_ino) == (head, inode)
    require_ok(run("wheel", "--arch", "x86_64"))
    require_ok(run("apply", "--until", "0001"))
    assert subjects(tree) == [COMMITS[0].subject]


@pytest.mark.parametrize("what", ["a change", "a branch", "one more", "the tag"])
def test_apply_takes_no_other_tree_for_written_back(built: Mini, run: Run, what: str) -> None:
    tree = built.tree
    git(tree, "commit", "-q", "--amend", "-m", message(COMMITS[2]).replace("Users saw numbers", "People saw numbers"))
    require_ok(run("refresh", tree))
    if what == "a change":
        (tree / "vllm" / "kept.py").write_text("# work\n")
    elif what == "a branch":
        git(tree, "branch", "work")
    elif what == "one more":
        commit(tree, {"vllm/kept.py": "# work\n"}, "work")
    else:
        # The series as seen from another source than the release's.
        text = SOURCE["vllm/kept.py"] + "\nMORE = 1\n"
        git(tree, "checkout", "-q", "--detach", "pristine")
        commit(tree, {"vllm/kept.py": text}, "other source")
        git(tree, "tag", "-f", "pristine")
        git(tree, "cherry-pick", "main~2", "main~1", "main")
        git(tree, "checkout", "-q", "-B", "main")
    head = git(tree, "rev-parse", "HEAD")
    require_error(run("apply"), "save them")
    assert git(tree, "rev-parse", "HEAD") == head


def test_a_tree_written_back_for_the_other_commands(built: Mini, run: Run) -> None:
    """An edit of the series does not touch build/vX.Y.Z; the next build starts from the series."""
    require_ok(run("edit", "0001"))
    amend(opened(built), "vllm/alpha.py", "x + 100", "100 + x")
    require(run("write-back", "--no-runs"), WRITTEN)
    require_ok(run("build", "--arch", "x86_64"))
    assert "return 100 + x" in (built.tree / "vllm" / "alpha.py").read_text()


def test_the_day_the_last_fix_is_native(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    native = {name: text for c in COMMITS for name, text in c.files.items() if name.startswith("vllm/")}
    with contextmanager(with_index)(mini, monkeypatch):
        later(mini, "0.28.0", native)
        require(run("rebase", "0.28.0"), 0)
        folder = mini.root / "patches" / "v0.28.0"
        assert sorted(p.name for p in folder.iterdir()) == ["base.toml", "series"]
        require_ok(run("lint", "--base", "0.28.0"))
        require_ok(run("apply", "--base", "0.28.0"))
        require_error(run("edit", "0001", "--base", "0.28.0"), "no patch 0001", "it has none")
        # There is nothing for quilt either.
        require_ok(run("edit", "--quilt", "--base", "0.28.0"))
        require(run("write-back"), NOTHING)


def test_two_edits_of_one_base(mini: Mini, run: Run) -> None:
    from filelock import FileLock

    (mini.build / "edit").mkdir(parents=True)
    with FileLock(mini.build / "edit" / ".lock-v0.27.1"):
        require_error(run("edit", "0001"), "another command holds the edit of vLLM 0.27.1")
