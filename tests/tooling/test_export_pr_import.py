"""Importing an exported branch: nothing, where nothing was edited; the edit, and only that, where something was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from exporting import (
    ALPHA,
    DELTA,
    NOT_RUN,
    NOTHING,
    PERSON,
    clone,
    quickly,
    record,
    series,
    tree,
    use,
    with_series,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from k3patches.pr import difference
from miniature import AUTHOR, COMMITS, Commit, Mini, Run, a_test, commit, git, require_error, require_ok

ONE = "0001-alpha-fix"
FIXED = str(COMMITS[0].files["vllm/alpha.py"])
EDITED = FIXED.replace("x + 100", "100 + x", 1)


@pytest.fixture(autouse=True)
def quick(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(mini, monkeypatch)
    use(mini)


def amend(there: Path, path: str, text: str) -> None:
    (there / path).write_text(text)
    git(there, "add", "-A")
    git(there, "commit", "-q", "--amend", "--no-edit")


def review(there: Path, path: str, text: str, said: str = "Apply suggestions from code review") -> None:
    """Commit as a maintainer who looked at it."""
    (there / path).write_text(text)
    who = "R. Eviewer <r@upstream.example>"
    git(there, "commit", "-q", "-a", f"--author={who}", "-m", said)


def patch_text(mini: Mini, name: str = ONE) -> str:
    return (mini.series_dir / f"{name}.patch").read_text()


def test_an_untouched_branch_changes_nothing(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "--all"))
    before = series(mini)
    for number in ("0001", "0002", "0003"):
        done = run("import-pr", number)
        assert done.code == NOTHING, done.err
        assert "nothing to do" in done.out
    assert series(mini) == before
    assert not (mini.build / "pr" / "work" / "v0.27.1.import").exists()


def test_what_was_amended_is_in_the_patch(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0001"))
    before = series(mini)
    amend(tree(mini, ONE), "vllm/alpha.py", EDITED)
    done = require_ok(run("import-pr", "0001"))
    after = series(mini)
    assert [name for name in after if after[name] != before[name]] == [f"{ONE}.patch"]
    assert done.out == f"patches/v0.27.1/{ONE}.patch: the edit\n"
    old, new = before[f"{ONE}.patch"].decode().splitlines(), patch_text(mini).splitlines()
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b and not a.startswith("index ")]
    assert pairs == [("+    return x + 100", "+    return 100 + x")]
    # The series is as good as before, and the branch is what an export gives.
    require_ok(run("lint"))
    content = git(tree(mini, ONE), "rev-parse", "HEAD^{tree}")
    assert run("import-pr", "0001").code == NOTHING
    require_ok(run("export-pr", "0001"))
    assert git(tree(mini, ONE), "rev-parse", "HEAD^{tree}") == content


def test_a_trailer_in_two_lines_and_one_that_git_wrote(mini: Mini, run: Run) -> None:
    """Upstream's branch has none of the fork's, and all come back."""
    picked = f"(cherry picked from commit {'0' * 40})"
    path = mini.series_dir / f"{ONE}.patch"
    text = path.read_text().replace("Contract: alpha-fix\n", "Contract: alpha-fix,\n delta-fix\n")
    path.write_text(text.replace(f"Signed-off-by: {AUTHOR}\n", f"Signed-off-by: {AUTHOR}\n{picked}\n"))
    shutil.copy2(mini.root / "tests/contracts/test_alpha_fix.py", mini.root / "tests/contracts/test_delta_fix.py")
    before = series(mini)
    require_ok(run("lint"))
    require_ok(run("export-pr", "0001"))
    told = git(tree(mini, ONE), "log", "-1", "--format=%B").rstrip("\n")
    assert told.endswith(f"alpha.py now adds 100.\n\nSigned-off-by: {AUTHOR}\n{picked}")
    description = (tree(mini, ONE).parent / "description.md").read_text()
    assert "test_alpha_fix.py" in description
    assert "test_delta_fix.py" in description
    assert "Upstream-Status" not in description
    assert picked not in description
    assert run("import-pr", "0001").code == NOTHING
    amend(tree(mini, ONE), "vllm/alpha.py", EDITED)
    require_ok(run("import-pr", "0001"))
    assert patch_text(mini).partition("\n---\n")[0] == before[f"{ONE}.patch"].decode().partition("\n---\n")[0]


def test_a_review_becomes_one_patch_with_credit(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0001"))
    there = tree(mini, ONE)
    review(there, "vllm/alpha.py", EDITED)
    said = "Shorter\n\nSigned-off-by: S. Econd <s@upstream.example>"
    review(there, "tests/test_alpha.py", a_test("alpha").replace("assert True", "assert not False"), said)
    require_ok(run("import-pr", "0001"))
    told = patch_text(mini)
    assert "+    return 100 + x" in told
    assert "+    assert not False" in told
    assert told.partition("\n---\n")[0].endswith(
        "Contract: alpha-fix\n"
        "Upstream-Status: Pending [not yet submitted]\n"
        f"Signed-off-by: {AUTHOR}\n"
        "Co-authored-by: R. Eviewer <r@upstream.example>\n"
        "Signed-off-by: S. Econd <s@upstream.example>"
    )
    # Exported anew, the branch is one commit again, with all of the credit.
    require_ok(run("export-pr", "0001"))
    assert git(there, "rev-list", "--count", "pristine..HEAD").strip() == "1"
    assert "Co-authored-by" in git(there, "log", "-1", "--format=%B")
    assert "Contract" not in git(there, "log", "-1", "--format=%B")


def test_a_message_that_was_edited(mini: Mini, run: Run) -> None:
    require_ok(run("export-pr", "0002", "--stack"))
    there = tree(mini, "0002-beta-fix")
    git(there, "commit", "-q", "--amend", "-m", f"[Model] Better words\n\nNew body.\n\nSigned-off-by: {AUTHOR}\n")
    require_ok(run("import-pr", "0002"))
    told = patch_text(mini, "0002-beta-fix").partition("\n---\n")[0]
    assert "Subject: [PATCH] [Model] Better words\n\nNew body.\n\nContract: beta-fix\nDepends-On: alpha-fix\n" in told
    assert told.endswith(f"Upstream-Status: Pending [not yet submitted]\nSigned-off-by: {AUTHOR}")


def test_later_patches_of_the_same_file(mini: Mini, run: Run) -> None:
    with_series(mini, (COMMITS[0], DELTA))
    require_ok(run("export-pr", "0001"))
    amend(tree(mini, ONE), "vllm/alpha.py", FIXED.replace("\n\ndef b", "\n\n# why\ndef b"))
    before = patch_text(mini, "0002-delta-fix")
    done = require_ok(run("import-pr", "0001"))
    assert "0002-delta-fix.patch: line numbers and blob ids" in done.out
    assert difference.how(before.encode(), patch_text(mini, "0002-delta-fix").encode()) == "line numbers and blob ids"
    require_ok(run("lint"))


def test_an_edit_beside_what_a_later_patch_changes(mini: Mini, run: Run) -> None:
    with_series(mini, (COMMITS[0], DELTA))
    require_ok(run("export-pr", "0001"))
    amend(tree(mini, ONE), "vllm/alpha.py", FIXED.replace("x + 111", "111 + x"))
    before = series(mini)
    done = run("import-pr", "0001")
    assert done.code == PERSON
    assert "0002-delta-fix.patch needs a person on top of the edit, 1 files in conflict" in done.err
    assert "import-pr.sh 0001 --base 0.27.1 --continue" in done.err
    assert series(mini) == before
    assert run("import-pr", "0001").code == PERSON
    work = mini.build / "pr" / "work" / "v0.27.1.import" / "tree"
    merged = (work / "vllm" / "alpha.py").read_text()
    assert "<<<<<<< 0001-alpha-fix.patch with the edit" in merged
    assert ">>>>>>> 0002-delta-fix.patch" in merged
    assert "conflict marker" in run("import-pr", "0001", "--continue").err
    (work / "vllm" / "alpha.py").write_text(FIXED.replace("x + 111", "1 + x"))
    done = require_ok(run("import-pr", "0001", "--continue"))
    assert "0002-delta-fix.patch: merged with the edit" in done.out
    assert "-    return 111 + x\n+    return 1 + x" in patch_text(mini, "0002-delta-fix")
    require_ok(run("lint"))


def test_an_edit_that_does_not_fit_the_series(mini: Mini, run: Run) -> None:
    # The patch stands on another in the series, and alone upstream.
    first = Commit(
        "gamma-fix",
        COMMITS[2].subject,
        COMMITS[2].body,
        {
            "tests/test_gamma.py": a_test("gamma"),
            "vllm/gamma.py": COMMITS[2].files["vllm/gamma.py"],
            "vllm/alpha.py": ALPHA.replace("x + 97", "x + 97  # first"),
        },
    )
    both = {"tests/test_alpha.py": a_test("alpha"), "vllm/alpha.py": FIXED.replace("x + 97", "x + 97  # first")}
    with_series(mini, (first, Commit("alpha-fix", COMMITS[0].subject, COMMITS[0].body, both)))
    require_ok(run("export-pr", "0002"))
    amend(tree(mini, "0002-alpha-fix"), "vllm/alpha.py", FIXED.replace("x + 97", "97 + x"))
    before = series(mini)
    done = run("import-pr", "0002")
    assert done.code == PERSON
    assert "the edit of 0002-alpha-fix.patch does not fit the series" in done.err
    require_ok(run("import-pr", "0002", "--abort"))
    assert series(mini) == before
    assert run("import-pr", "0002").code == PERSON
    work = mini.build / "pr" / "work" / "v0.27.1.import" / "tree"
    (work / "vllm" / "alpha.py").write_text(FIXED.replace("x + 97", "97 + x  # first"))
    require_ok(run("import-pr", "0002", "--continue"))
    told = patch_text(mini, "0002-alpha-fix")
    assert "-    return x + 97  # first\n+    return 97 + x  # first" in told
    # What a merge onto the release can no longer do by itself is noted, so that an export gives that branch.
    content = git(tree(mini, "0002-alpha-fix"), "rev-parse", "HEAD^{tree}")
    assert (mini.root / "patches" / "pr" / "v0.27.1" / "alpha-fix.patch").is_file()
    require_ok(run("export-pr", "0002"))
    assert git(tree(mini, "0002-alpha-fix"), "rev-parse", "HEAD^{tree}") == content


def test_from_a_clone(mini: Mini, run: Run) -> None:
    there = clone(mini)
    require_ok(run("export-pr", "0001", "--onto", there, "then"))
    git(there, "worktree", "add", "-q", str(mini.root / "wt"), "k3/alpha-fix")
    review(mini.root / "wt", "vllm/alpha.py", EDITED)
    require_ok(run("import-pr", "0001", "--from", there))
    assert "+    return 100 + x" in patch_text(mini)
    assert record(mini, ONE, "v0.27.1-onto-then")["imported"] == git(mini.root / "wt", "rev-parse", "HEAD").strip()


def test_from_a_clone_that_nobody_here_knows(mini: Mini, run: Run) -> None:
    there = clone(mini)
    require_ok(run("export-pr", "0001", "--onto", there, "then"))
    shutil.rmtree(mini.build)
    require_error(run("import-pr", "0001", "--from", there), "not exported from here", "--since")
    assert run("import-pr", "0001", "--from", there, "--since", "then").code == NOTHING
    git(there, "stash", "-q")
    git(there, "checkout", "-q", "k3/alpha-fix")
    review(there, "vllm/alpha.py", EDITED)
    require_ok(run("import-pr", "0001", "--from", there, "--since", "then"))
    assert "+    return 100 + x" in patch_text(mini)


def test_a_branch_that_was_rebased(mini: Mini, run: Run) -> None:
    there = clone(mini)
    require_ok(run("export-pr", "0001", "--onto", there, "then"))
    git(there, "stash", "-q")
    git(there, "checkout", "-q", "main")
    # Upstream goes on, beside what the patch changes.
    (there / "vllm" / "alpha.py").write_text(ALPHA.replace("\n\ndef a", "\n\n# one\n\n\ndef a", 1))
    git(there, "commit", "-q", "-a", "-m", "upstream goes on")
    git(there, "checkout", "-q", "k3/alpha-fix")
    git(there, "rebase", "-q", "main")
    amend(there, "vllm/alpha.py", (there / "vllm" / "alpha.py").read_text().replace("x + 100", "100 + x"))
    require_error(run("import-pr", "0001", "--from", there), "on another branch as well", "--since")
    require_ok(run("import-pr", "0001", "--from", there, "--since", "main"))
    told = patch_text(mini)
    assert "+    return 100 + x" in told
    # Upstream's own change is none of the patch.
    assert "# one" not in told
    require_ok(run("lint"))


def test_what_cannot_be_imported(mini: Mini, run: Run) -> None:
    require_error(run("import-pr", "0001"), "no exported branch", "--from")
    require_error(run("import-pr", "0009"), "no patch 0009")
    require_error(run("import-pr", "0001", "--from", "nowhere"), "nowhere is no folder")
    require_error(run("import-pr", "0001", "--continue"), "start one without --continue")
    require_error(run("import-pr", "0001", "--abort"), "nothing to abort")
    assert run("import-pr", "0001", "--abort", "--continue").code == 2
    require_ok(run("export-pr", "0001"))
    there = tree(mini, ONE)
    (there / "vllm" / "alpha.py").write_text("x\n")
    require_error(run("import-pr", "0001"), "in no commit", "amend")
    git(there, "checkout", "-q", ".")
    git(there, "branch", "side", "pristine")
    git(there, "checkout", "-q", "side")
    commit(there, {"vllm/kept.py": "1\n"}, "side")
    git(there, "checkout", "-q", "k3/alpha-fix")
    git(there, "merge", "-q", "--no-edit", "side")
    require_error(run("import-pr", "0001"), "has a merge", "rebase")
    git(there, "reset", "-q", "--hard", "pristine")
    require_error(run("import-pr", "0001"), "no commit of the patch")
    shutil.rmtree(there)
    require_error(run("import-pr", "0001"), "no git tree any more", "export again")


class Killed(BaseException):
    """What ends the import as a signal would."""


def test_an_import_that_was_killed(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_series(mini, (COMMITS[0], DELTA))
    require_ok(run("export-pr", "0001"))
    amend(tree(mini, ONE), "vllm/alpha.py", EDITED)
    before = series(mini)
    rename = Path.rename

    def stops(self: Path, target: Path) -> Path:
        # Between the old folder's going and the new one's coming.
        if self.name == "new" and Path(target) == mini.series_dir:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stops)
        with pytest.raises(Killed):
            run("import-pr", "0001")
    assert not mini.series_dir.exists()
    # Whatever is run next finishes it.
    assert run("import-pr", "0001").code in (0, NOTHING)
    assert "+    return 100 + x" in patch_text(mini)
    assert series(mini).keys() == before.keys()
    require_ok(run("lint"))


LETTERS = st.sampled_from("abcdefghijkmnop")


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(LETTERS, st.sampled_from(["comment", "another", "line"]), min_size=1, max_size=4), st.booleans())
def test_any_edit_there_and_back(mini: Mini, run: Run, edits: dict[str, str], in_review: bool) -> None:
    """Whatever is edited, the tree at the patch has the edit, no other patch changes, and an export gives it back."""
    shutil.rmtree(mini.build, ignore_errors=True)
    with_series(mini, (COMMITS[0], COMMITS[2]))
    require_ok(run("export-pr", "0001"))
    there = tree(mini, ONE)
    text = FIXED
    for letter, kind in edits.items():
        old = f"def {letter}(x: int) -> int:\n"
        new = {
            "comment": f"# about {letter}\n{old}",
            "another": old.replace("(x:", "(x: int, y:"),
            "line": f"{old}    x = x + 0\n",
        }[kind]
        text = text.replace(old, new)
    (review if in_review else amend)(there, "vllm/alpha.py", text)
    content = git(there, "rev-parse", "HEAD^{tree}")
    before = series(mini)
    require_ok(run("import-pr", "0001"))
    after = series(mini)
    assert [name for name in after if after[name] != before[name]] == [f"{ONE}.patch"]
    require_ok(run("apply", "--until", "0001"))
    assert (mini.tree / "vllm" / "alpha.py").read_text() == text
    assert run("export-pr", "0001", "--no-runs").code == NOT_RUN
    assert git(there, "rev-parse", "HEAD^{tree}") == content
