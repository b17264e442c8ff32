"""A fix is started with all that it needs, and none of it passes before it is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature import AUTHOR, ROOT, SPDX, Mini, Run, git, require_error, require_ok
from patchwork import WRITTEN, edit_dir, opened, quickly, written
from rebasing import CONTRACTS, write_contracts
from test_patchwork import require

SUBJECT = "[Bugfix] Keep what delta is"
WORDS = (
    "delta.py was not there.",
    "Users saw an ImportError.",
    "delta.py is added.",
)


@pytest.fixture(autouse=True)
def ran(mini: Mini, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[list[str]]]:
    name, _, address = AUTHOR[:-1].partition(" <")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(f"[user]\n\tname = {name}\n\temail = {address}\n")
    yield from quickly(mini, monkeypatch)


def contract(mini: Mini, fix: str = "delta-fix") -> Path:
    return mini.root / "tests" / "contracts" / f"test_{fix.replace('-', '_')}.py"


def message(mini: Mini) -> str:
    return git(opened(mini), "log", "-1", "--format=%B").strip()


def test_a_fix_is_started(mini: Mini, run: Run) -> None:
    told = require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    assert told.out == f"{opened(mini)}\n"
    assert "tests/contracts/test_delta_fix.py" in told.err
    assert "tests/test_delta_fix.py" in told.err
    assert message(mini).splitlines()[0] == SUBJECT
    assert message(mini).splitlines()[-3:] == [
        "Contract: delta-fix",
        "Upstream-Status: Pending [not yet submitted]",
        f"Signed-off-by: {AUTHOR}",
    ]
    assert git(opened(mini), "log", "-1", "--format=%an <%ae>").strip() == AUTHOR
    assert (opened(mini) / "tests" / "test_delta_fix.py").read_text().startswith(SPDX)
    assert "cpu_test" in (opened(mini) / "tests" / "test_delta_fix.py").read_text()
    assert git(opened(mini), "status", "--porcelain") == ""
    assert (
        (mini.root / "patches" / "pr" / "known.toml").read_text().endswith('\n[delta-fix]\nharm = ""\nsymptom = ""\n')
    )


def test_contract_and_test_fail_as_they_are(mini: Mini, run: Run) -> None:
    """Run by pytest itself: nothing is skipped, nothing passes."""
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    test = opened(mini) / "tests" / "test_delta_fix.py"
    # Both have the same name.
    how = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *how, contract(mini), test], cwd=mini.root, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    # And they are in the form that both projects ask for.
    for folder, file in ((ROOT, contract(mini)), (opened(mini), test)):
        for form in (["check"], ["format", "--check"]):
            named = [sys.executable, "-m", "ruff", *form, "--no-cache", "--stdin-filename", "tests/test_x.py", "-"]
            with file.open() as text:
                formed = subprocess.run(named, stdin=text, capture_output=True, text=True, cwd=folder)
            assert formed.returncode == 0, formed.stdout + formed.stderr


def test_nothing_passes_before_it_is_written(mini: Mini, run: Run, ran: list[list[str]]) -> None:
    before = written(mini)
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    tree = opened(mini)
    told = require_error(run("write-back", "--no-runs"), "the message of 0004-delta-fix.patch is not written")
    assert "the contract test_delta_fix.py is not written" in told
    text = message(mini).splitlines()
    for words in WORDS:
        text[next(i for i, line in enumerate(text) if line.startswith("TODO: "))] = words
        git(tree, "commit", "-q", "--amend", "-m", "\n".join(text))
        require_error(run("write-back", "--no-runs"), "is not written")
    contract(mini).write_text('there("delta")\n')
    require_error(run("write-back"), "delta-fix does not hold, with the series")
    (tree / "vllm" / "delta.py").write_text(SPDX + "\nDELTA = True\n")
    require_error(run("write-back"), "vllm/delta.py is in no commit")
    contract(mini).write_text('there("alpha")\n')
    require_error(run("write-back", "--amend"), "delta-fix holds without 0004-delta-fix.patch")
    contract(mini).write_text('there("delta")\n')
    assert {n for n, data in written(mini).items() if data != before.get(n)} == {
        "patches/pr/known.toml",
        "tests/contracts/test_delta_fix.py",
    }
    require(run("write-back"), WRITTEN, "0004-delta-fix.patch: new")
    assert ran[-1] == ["0004-delta-fix.patch"]
    require_ok(run("lint"))
    assert not edit_dir(mini).exists()
    require_error(run("new", "delta-fix", "--subject", SUBJECT), "delta-fix is a known fix")


def test_a_fix_that_is_thrown_away_leaves_nothing(mini: Mini, run: Run) -> None:
    before = written(mini)
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    require_ok(run("edit", "--abort"))
    assert written(mini) == before
    require_ok(run("new", "delta-fix", "--subject", SUBJECT, "--test", "tests/kernels/test_delta.py"))
    assert (opened(mini) / "tests" / "kernels" / "test_delta.py").is_file()
    contract(mini).write_text("# hours of work\n")
    told = require_ok(run("edit", "--abort"))
    assert "tests/contracts/test_delta_fix.py stays" in told.err
    assert contract(mini).read_text() == "# hours of work\n"


def test_a_start_that_was_cut_short_starts_again(mini: Mini, run: Run) -> None:
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    begun = written(mini)
    (edit_dir(mini) / "edit.json").unlink()
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    assert written(mini) == begun


@pytest.mark.parametrize(
    ("fix", "options", "words"),
    [
        ("alpha-fix", (), ["alpha-fix is a known fix", "never used again"]),
        ("Delta_Fix", (), ["no fix's id"]),
        ("delta", (), ["no fix's id"]),
        ("../delta-fix", (), ["no fix's id"]),
        ("delta-fix", ("--subject", "Keep what delta is"), ["not in vLLM's style"]),
        ("delta-fix", ("--subject", "[Bugfix] " + "long " * 20), ["not in vLLM's style", "72"]),
        ("delta-fix", ("--test", "vllm/test_delta.py"), ["no test module"]),
        ("delta-fix", ("--test", "tests/../test_delta.py"), ["no test module"]),
        ("delta-fix", ("--test", "tests/test_old.py"), ["tests/test_old.py exists in vLLM 0.27.1"]),
        ("delta-fix", ("--base", "0.26.0"), ["no series for vLLM 0.26.0"]),
    ],
)
def test_words_for_what_cannot_be_started(
    mini: Mini, run: Run, fix: str, options: tuple[str, ...], words: list[str]
) -> None:
    before = written(mini)
    subject = () if "--subject" in options else ("--subject", SUBJECT)
    require_error(run("new", fix, *subject, *options), *words)
    assert written(mini) == before
    assert not edit_dir(mini).exists()


def test_an_id_of_another_base_is_known_too(mini: Mini, run: Run) -> None:
    write_contracts(mini, {k: v for k, v in CONTRACTS.items() if k != "gamma-fix"})
    require_error(run("new", "gamma-fix", "--subject", SUBJECT), "gamma-fix is a known fix, on vLLM 0.27.1")
    with (mini.series_dir / "base.toml").open("a") as file:
        file.write('\n[native]\ndelta-fix = "0.27.1"\n')
    require_error(run("new", "delta-fix", "--subject", SUBJECT), "delta-fix is a known fix, on vLLM 0.27.1")


def test_without_an_identity(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".gitconfig").write_text("[user]\n\tuseConfigOnly = true\n")
    require_error(run("new", "delta-fix", "--subject", SUBJECT), "git config --global user.name")
    # The checkout's own identity counts in the edit as well.
    git(mini.root, "init", "-q", ".")
    git(mini.root, "config", "user.name", "Some Body")
    git(mini.root, "config", "user.email", "some@body.example")
    require_ok(run("new", "delta-fix", "--subject", SUBJECT))
    assert message(mini).endswith("Signed-off-by: Some Body <some@body.example>")
    assert git(opened(mini), "config", "user.name").strip() == "Some Body"
