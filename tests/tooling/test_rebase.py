"""Carrying the series to other releases: what is dropped, what needs a person, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k3patches import base as bases
from k3patches import contracts
from k3patches.rebase import publish
from k3patches.rebase import target as targets
from miniature import (
    AUTHOR,
    PATCHES,
    SOURCE,
    SPDX,
    Mini,
    Result,
    Run,
    a_test,
    commit,
    git,
    module,
    require_error,
    require_ok,
)
from rebasing import CONTRACTS, JsonIndex, later, quickly, run_contracts, write_contracts

REBASED, NOTHING, PERSON, BROKEN = 0, 3, 4, 5
ALPHA, GAMMA = SOURCE["vllm/alpha.py"], SOURCE["vllm/gamma.py"]
# Lines that come before everything that the patches change.
SHIFTED = {"vllm/alpha.py": ALPHA.replace("\n\ndef a", "\n\n# one\n# more\n\n\ndef a", 1)}
FIXED = {"vllm/alpha.py": ALPHA.replace("x + 99", "99 + 1 + x")}
CONFLICT = {"vllm/alpha.py": ALPHA.replace("x + 99", "99 + x")}
RESOLVED = ALPHA.replace("x + 99", "100 + x")


@pytest.fixture(autouse=True)
def quick(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonIndex]:
    """Contracts of one expression, and an index that knows all releases."""
    yield from quickly(mini, monkeypatch)


def work(mini: Mini, name: str = "v0.28.0") -> Path:
    return mini.build / "rebase" / name


def edited(mini: Mini, name: str = "v0.28.0") -> Path:
    return work(mini, name) / "tree"


def written(mini: Mini) -> dict[str, bytes]:
    """All of patches/, by path."""
    folder = mini.root / "patches"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(mini: Mini, release: str = "0.28.0") -> list[str]:
    lines = (mini.root / "patches" / f"v{release}" / "series").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def mail(mini: Mini, name: str, release: str = "0.28.0") -> str:
    return (mini.root / "patches" / f"v{release}" / name).read_text()


def resolution(mini: Mini, fix: str, release: str = "0.28.0") -> Path:
    return mini.root / "patches" / "resolutions" / f"v{release}" / f"{fix}.patch"


def report(mini: Mini, name: str = "v0.28.0") -> dict[str, Any]:
    told: dict[str, Any] = json.loads((work(mini, name) / "report.json").read_text())
    return told


def states(mini: Mini, name: str = "v0.28.0") -> dict[str, str]:
    return {row["fix"]: row["state"] for row in report(mini, name)["fixes"]}


def require(result: Result, code: int, *words: str) -> Result:
    assert result.code == code, (result.code, result.err, result.out)
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err + result.out
    if code in (PERSON, BROKEN):
        assert result.err.splitlines()[-1].startswith("Error: ")
    return result


def require_settled(mini: Mini, run: Run, *targets: str) -> None:
    """Nothing is left over, and running again changes no byte, also without what was remembered and recorded."""
    before = written(mini)
    for target in targets or ("0.28.0",):
        assert sorted(p.name for p in work(mini, f"v{target}").iterdir()) == ["report.json", "report.md"]
        require(run("rebase", target), NOTHING)
        require(run("rebase", target, "--fresh"), NOTHING)
        assert written(mini) == before
    for target in targets or ("0.28.0",):
        shutil.rmtree(mini.root / "patches" / f"v{target}")
    shutil.rmtree(mini.build / "rebase")
    for target in targets or ("0.28.0",):
        require(run("rebase", target), REBASED)
    assert written(mini) == before
    assert [p for p in mini.leftovers() if "rebase" not in p.parts] == []


def test_a_clean_rebase(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", SHIFTED)
    require(run("rebase", "0.28.0"), REBASED, "vLLM 0.28.0: rebased, patches/v0.28.0")
    assert names(mini) == list(PATCHES)
    assert set(states(mini).values()) == {"patched"}
    base = bases.load(mini.root / "patches" / "v0.28.0")
    assert (base.commit, base.torch, base.released.isoformat()) == ("2cf0a6915", "2.14.0", "2026-08-26T10:08:30+00:00")
    assert base.sdist.size == (mini.files / base.sdist.filename).stat().st_size
    assert list(base.wheels) == ["x86_64", "aarch64"]
    # A patch that nothing moved is the same, byte for byte.
    assert mail(mini, PATCHES[2]) == mail(mini, PATCHES[2], "0.27.1")
    carried = report(mini)["carried"]
    assert [(c["key"], c["how"]) for c in carried] == [(f"{f}-fix", "clean") for f in ("alpha", "beta", "gamma")]
    assert carried[0]["moved"] == [{"path": "vllm/alpha.py", "now": "vllm/alpha.py", "offsets": [4]}]
    assert report(mini)["exit_code"] == 0
    require_settled(mini, run)
    require_ok(run("lint", "--base", "0.28.0"))


def test_the_index_is_asked_only_for_what_is_not_pinned(mini: Mini, run: Run, quick: JsonIndex) -> None:
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    asked = quick.asked
    assert asked
    require(run("rebase", "0.28.0"), NOTHING)
    assert quick.asked == asked


def test_contracts_run_once_on_one_content(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def count(folder: Path, chosen: list[str], *args: Any, **kwargs: Any) -> Any:
        ran.extend(chosen)
        return run_contracts(folder, chosen, *args, **kwargs)

    monkeypatch.setattr(contracts, "run", count)
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    assert sorted(ran) == sorted([*CONTRACTS, *CONTRACTS])
    ran.clear()
    require(run("rebase", "0.28.0"), NOTHING)
    assert ran == []
    write_contracts(mini, {**CONTRACTS, "beta-fix": 'there("new") and True'})
    require(run("rebase", "0.28.0"), NOTHING)
    assert ran == ["beta-fix", "beta-fix"]
    ran.clear()
    # What contracts share counts for each of them.
    (mini.root / "tests" / "contracts" / "conftest.py").write_text("# shared\n")
    require(run("rebase", "0.28.0"), NOTHING)
    assert len(ran) == 6


def test_a_native_fix_is_dropped(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", FIXED)
    require(run("rebase", "0.28.0"), REBASED, "0001-alpha-fix.patch of vLLM 0.27.1: dropped, native")
    assert names(mini) == ["0001-beta-fix.patch", "0002-gamma-fix.patch"]
    assert "Depends-On" not in mail(mini, "0001-beta-fix.patch")
    assert bases.load(mini.root / "patches" / "v0.28.0").native == {"alpha-fix": "0.28.0"}
    assert states(mini)["alpha-fix"] == "native"
    assert "native since 0.28.0" in (work(mini) / "report.md").read_text()
    later(mini, "0.29.0", FIXED)
    require(run("rebase", "0.29.0"), REBASED)
    assert bases.load(mini.root / "patches" / "v0.29.0").native == {"alpha-fix": "0.28.0"}
    require_settled(mini, run, "0.28.0", "0.29.0")
    require_ok(run("lint", "--base", "0.28.0"))


def test_a_fix_that_was_native_and_is_no_more(mini: Mini, run: Run) -> None:
    """Its patch comes from the base that has one, at the place that it has there."""
    gamma = {"vllm/gamma.py": GAMMA.replace("x + 98", "x - 90 - 8"), "vllm/new.py": SPDX}
    later(mini, "0.28.0", gamma)
    later(mini, "0.29.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    assert names(mini) == ["0001-alpha-fix.patch"]
    require(run("rebase", "0.29.0"), REBASED)
    assert names(mini, "0.29.0") == list(PATCHES)
    assert bases.load(mini.root / "patches" / "v0.29.0").native == {}
    assert [c["source"] for c in report(mini, "v0.29.0")["carried"]] == [
        "0001-alpha-fix.patch of vLLM 0.28.0",
        "0002-beta-fix.patch of vLLM 0.27.1",
        "0003-gamma-fix.patch of vLLM 0.27.1",
    ]
    require_settled(mini, run, "0.28.0", "0.29.0")


def test_a_fix_that_has_been_native_all_along(mini: Mini, run: Run) -> None:
    write_contracts(mini, {**CONTRACTS, "old-fix": 'there("kept")'})
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    assert bases.load(mini.root / "patches" / "v0.28.0").native == {"old-fix": "0.27.1"}


def test_an_absent_feature(mini: Mini, run: Run) -> None:
    write_contracts(mini, {**CONTRACTS, "gamma-fix": f'{CONTRACTS["gamma-fix"]} if there("gamma") else absent()'})
    later(mini, "0.28.0", {"vllm/gamma.py": None})
    require(run("rebase", "0.28.0"), REBASED, "0003-gamma-fix.patch of vLLM 0.27.1: dropped, absent")
    assert names(mini) == list(PATCHES[:2])
    assert bases.load(mini.root / "patches" / "v0.28.0").absent == {"gamma-fix": "0.28.0"}
    assert states(mini)["gamma-fix"] == "absent"
    require_settled(mini, run)


def conflict(mini: Mini, run: Run) -> Path:
    """A rebase that waits at the first patch, and the file in conflict."""
    later(mini, "0.28.0", CONFLICT)
    require(run("rebase", "0.28.0"), PERSON, "0001-alpha-fix.patch", "build/rebase/v0.28.0/tree", "--continue")
    return edited(mini) / "vllm" / "alpha.py"


def test_a_conflict(mini: Mini, run: Run) -> None:
    before = written(mini)
    file = conflict(mini, run)
    assert written(mini) == before
    assert (
        "<<<<<<< vLLM 0.28.0\n    return 99 + x\n||||||| vLLM 0.27.1\n    return x + 99\n=======\n"
        "    return x + 100\n>>>>>>> vLLM 0.27.1 with alpha-fix\n"
    ) in file.read_text()
    told = report(mini)
    assert (told["result"], told["exit_code"]) == ("needs a person", PERSON)
    assert [(c["patch"], c["path"], len(c["hunks"])) for c in told["conflicts"]] == [("alpha-fix", "vllm/alpha.py", 1)]
    assert list(told["pending"]) == ["alpha-fix", "beta-fix", "gamma-fix"]
    text = (work(mini) / "report.md").read_text()
    assert "<<<<<<< vLLM 0.28.0" in text
    assert "- `alpha-fix`: in conflict (0001-alpha-fix.patch of vLLM 0.27.1)" in text
    # Nobody's work is thrown away by running again, or taken for done.
    require(run("rebase", "0.28.0"), PERSON, "--continue", "--abort")
    require(run("rebase", "--continue"), PERSON, "vllm/alpha.py", "conflict marker")
    file.write_text(RESOLVED)
    (edited(mini) / "notes.txt").write_text("mine")
    require(run("rebase", "--continue"), PERSON, "notes.txt")
    (edited(mini) / "notes.txt").unlink()
    require(run("rebase", "--continue"), REBASED)
    assert "-    return 99 + x\n+    return 100 + x\n" in mail(mini, PATCHES[0])
    assert resolution(mini, "alpha-fix").read_text().count("<<<<<<< vLLM 0.28.0") == 1
    assert [c["how"] for c in report(mini)["carried"]] == ["person", "clean", "clean"]
    require_settled(mini, run)
    assert [c["how"] for c in report(mini)["carried"]] == ["resolution", "clean", "clean"]
    require_ok(run("lint", "--base", "0.28.0"))


def test_a_long_conflict_is_told_in_short(mini: Mini, run: Run) -> None:
    lines = "".join(f"    x += {n}\n" for n in range(100))
    later(mini, "0.28.0", {"vllm/alpha.py": ALPHA.replace("    return x + 99", f"{lines}    return x")})
    require(run("rebase", "0.28.0"), PERSON)
    (hunk,) = (h["text"] for c in report(mini)["conflicts"] for h in c["hunks"])
    assert "... 61 more lines ..." in hunk
    assert hunk.splitlines()[-2:] == ["    return x + 100", ">>>>>>> vLLM 0.27.1 with alpha-fix"]
    assert len(hunk.splitlines()) == 41 + 6


@pytest.mark.parametrize("way", ["add", "commit", "cherry-pick"])
def test_a_conflict_resolved_with_ordinary_git(mini: Mini, run: Run, way: str) -> None:
    conflict(mini, run).write_text(RESOLVED)
    git(edited(mini), "add", "-A")
    if way == "commit":
        git(edited(mini), "commit", "-q", "--no-edit")
    if way == "cherry-pick":
        git(edited(mini), "-c", "core.editor=true", "cherry-pick", "--continue")
    require(run("rebase", "0.28.0", "--continue"), REBASED)
    assert names(mini) == list(PATCHES)
    assert mail(mini, PATCHES[0]).splitlines()[1:4] == mail(mini, PATCHES[0], "0.27.1").splitlines()[1:4]
    require_settled(mini, run)


def test_a_resolution_that_no_longer_fits(mini: Mini, run: Run) -> None:
    conflict(mini, run).write_text(RESOLVED)
    require(run("rebase", "--continue"), REBASED)
    path = resolution(mini, "alpha-fix")
    path.write_text(path.read_text().replace("return 99 + x", "return 98 + x"))
    require(run("rebase", "0.28.0"), PERSON, "resolutions/v0.28.0/alpha-fix.patch records no longer fits")
    assert ">>>>>>> vLLM 0.27.1 with alpha-fix" in (edited(mini) / "vllm" / "alpha.py").read_text()
    (edited(mini) / "vllm" / "alpha.py").write_text(RESOLVED)
    require(run("rebase", "--continue"), REBASED)
    require_settled(mini, run)


def test_a_resolution_that_is_needed_no_more_goes(mini: Mini, run: Run) -> None:
    conflict(mini, run).write_text(RESOLVED)
    require(run("rebase", "--continue"), REBASED)
    write_contracts(mini, {**CONTRACTS, "alpha-fix": "True"})
    require(run("rebase", "0.28.0"), REBASED)
    assert names(mini) == ["0001-beta-fix.patch", "0002-gamma-fix.patch"]
    assert not (mini.root / "patches" / "resolutions").exists()


def test_abort_leaves_nothing(mini: Mini, run: Run) -> None:
    before = written(mini)
    conflict(mini, run).write_text("half done")
    require(run("rebase", "--abort"), 0)
    assert not work(mini).exists()
    assert written(mini) == before
    require_error(run("rebase", "0.28.0", "--abort"), "nothing to abort")
    require_error(run("rebase", "--abort"), "no rebase is kept")
    require_error(run("rebase", "0.28.0", "--continue"), "waits for anybody")
    require(run("rebase", "0.28.0"), PERSON)


def test_a_patch_that_applies_and_does_its_job_no_more(mini: Mini, run: Run) -> None:
    """What the patch mends is elsewhere now, and the old place is still there."""
    later(mini, "0.28.0", {"vllm/omega.py": module("c")})
    before = written(mini)
    require(run("rebase", "0.28.0"), PERSON, "the contract of alpha-fix does not hold", "--continue")
    assert written(mini) == before
    assert states(mini) == {"alpha-fix": "needs a person", "beta-fix": "patched", "gamma-fix": "patched"}
    require(run("rebase", "--continue"), PERSON, "the contract of alpha-fix does not hold")
    omega = edited(mini) / "vllm" / "omega.py"
    omega.write_text(omega.read_text().replace("x + 99", "x + 100"))
    require(run("rebase", "--continue"), PERSON, "vllm/omega.py", "git commit --fixup")
    first = git(edited(mini), "rev-list", "--reverse", "pristine..HEAD").split()[0]
    git(edited(mini), "commit", "-q", "-a", "--fixup", first)
    git(
        edited(mini),
        "-c",
        "core.editor=true",
        "-c",
        "sequence.editor=true",
        "rebase",
        "-q",
        "-i",
        "--autosquash",
        "pristine",
    )
    require(run("rebase", "--continue"), REBASED)
    assert "+++ b/vllm/omega.py" in mail(mini, PATCHES[0])
    assert "alpha.py" not in resolution(mini, "alpha-fix").read_text().split("\ndiff --git", 1)[1]
    assert [c["how"] for c in report(mini)["carried"]] == ["person", "clean", "clean"]
    require_settled(mini, run)


def test_a_patch_that_breaks_a_native_fix(mini: Mini, run: Run) -> None:
    write_contracts(mini, {**CONTRACTS, "old-fix": 'not there("new")'})
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), PERSON, "the contract of old-fix does not hold")


def test_a_renamed_file(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", {"vllm/alpha.py": None, "vllm/letters.py": ALPHA})
    require(run("rebase", "0.28.0"), REBASED)
    text = mail(mini, PATCHES[0])
    assert "+++ b/vllm/letters.py" in text
    assert "The function c of letters.py added 99" in text
    moved = report(mini)["carried"][0]["moved"]
    assert moved == [{"path": "vllm/alpha.py", "now": "vllm/letters.py", "offsets": [0]}]
    assert "`vllm/alpha.py` is `vllm/letters.py` now" in (work(mini) / "report.md").read_text()
    require_settled(mini, run)
    require_ok(run("lint", "--base", "0.28.0"))


def test_a_function_that_moved_to_another_file(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", {"vllm/alpha.py": module("abdefghijkmnop"), "vllm/omega.py": module("c")})
    require(run("rebase", "0.28.0"), PERSON, "1 files in conflict")
    git(edited(mini), "checkout", "-q", "HEAD", "vllm/alpha.py")
    omega = edited(mini) / "vllm" / "omega.py"
    omega.write_text(omega.read_text().replace("x + 99", "x + 100"))
    require(run("rebase", "--continue"), REBASED)
    assert "+++ b/vllm/omega.py" in mail(mini, PATCHES[0])
    require_settled(mini, run)


def test_a_file_that_the_target_no_longer_has(mini: Mini, run: Run) -> None:
    """git leaves it without a marker: what becomes of it must be said."""
    later(mini, "0.28.0", {"vllm/alpha.py": None, "vllm/omega.py": SPDX + "\n\ndef c(x):\n    return x\n"})
    require(run("rebase", "0.28.0"), PERSON)
    assert report(mini)["conflicts"][0]["how"].startswith("vLLM 0.28.0 has no such file")
    (edited(mini) / "vllm" / "omega.py").write_text(SPDX + "\n\ndef c(x):\n    return x + 100\n")
    require(run("rebase", "--continue"), PERSON, "vllm/alpha.py is still undecided")
    git(edited(mini), "rm", "-q", "vllm/alpha.py")
    require(run("rebase", "--continue"), REBASED)
    assert "alpha.py" not in mail(mini, PATCHES[0]).split("\ndiff --git", 1)[1].replace("test_alpha.py", "")
    require_settled(mini, run)


def test_a_patch_that_is_left_out_while_another_does_its_job(mini: Mini, run: Run) -> None:
    conflict(mini, run)
    git(edited(mini), "cherry-pick", "--skip")
    require(run("rebase", "--continue"), BROKEN, "lacks alpha-fix")
    file = edited(mini) / "vllm" / "alpha.py"
    file.write_text(RESOLVED)
    message = git(edited(mini), "log", "-1", "--format=%B").replace(
        "Contract: gamma-fix", "Contract: gamma-fix, alpha-fix"
    )
    git(
        edited(mini),
        "commit",
        "-q",
        "-a",
        "--amend",
        "-m",
        message.replace("gamma.py now", "alpha.py and gamma.py now"),
    )
    require(run("rebase", "--continue"), REBASED)
    assert names(mini) == ["0001-beta-fix.patch", "0002-gamma-fix.patch"]
    assert "-alpha-fix" in resolution(mini, "alpha-fix").with_name("series").read_text()
    assert not resolution(mini, "alpha-fix").exists()
    require_settled(mini, run)


def test_a_fault_that_no_patch_is_for(mini: Mini, run: Run) -> None:
    write_contracts(mini, {**CONTRACTS, "new-fix": 'call("kept", name="x") == 122'})
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), BROKEN, "lacks new-fix", "write one as a commit")
    assert states(mini)["new-fix"] == "broken"
    file = edited(mini) / "vllm" / "kept.py"
    file.write_text(file.read_text().replace("x + 120", "x + 121"))
    (edited(mini) / "tests" / "test_new.py").write_text(a_test("new"))
    git(edited(mini), "add", "-A")
    git(edited(mini), "commit", "-q", "-m", "[Bugfix] Mend kept.py\n\nA.\n\nB.\n\nC.\n\nno trailer")
    require(run("rebase", "--continue"), PERSON, "names no fix", "Contract trailer")
    git(edited(mini), "commit", "-q", "--amend", "-m", "[Bugfix] Mend kept.py\n\nA.\n\nContract: newer-fix")
    require(run("rebase", "--continue"), PERSON, "newer-fix, which has no contract")
    trailers = f"Contract: new-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}"
    message = f"[Bugfix] Mend what kept.py says\n\nA.\n\nB.\n\nC.\n\n{trailers}"
    git(edited(mini), "commit", "-q", "--amend", "-m", message)
    require(run("rebase", "--continue"), REBASED)
    assert names(mini) == [*PATCHES, "0004-new-fix.patch"]
    assert resolution(mini, "new-fix").with_name("series").read_text().splitlines()[1:] == [
        "alpha-fix",
        "beta-fix",
        "gamma-fix",
        "new-fix",
    ]
    require_settled(mini, run)
    require_ok(run("lint", "--base", "0.28.0"))
    # It goes on to the next release like any other patch.
    later(mini, "0.29.0", {})
    require(run("rebase", "0.29.0"), REBASED)
    assert names(mini, "0.29.0") == [*PATCHES, "0004-new-fix.patch"]


@pytest.mark.parametrize(
    "text",
    [
        "nothing_ran()",
        # Only with the patches, or only without them.
        'call("gamma", name="b") == -97 and nothing_ran()',
        'call("gamma", name="b") != -97 and nothing_ran()',
    ],
)
def test_a_contract_of_which_no_test_ran_says_nothing(mini: Mini, run: Run, text: str) -> None:
    """It is no fix that the target lacks, and no patch is to blame."""
    later(mini, "0.28.0", {})
    write_contracts(mini, {**CONTRACTS, "beta-fix": text})
    before = written(mini)
    require(run("rebase", "0.28.0"), BROKEN, "no test of test_beta_fix.py ran there", "mend the contract")
    assert report(mini)["result"] == "broken"
    assert written(mini) == before
    write_contracts(mini, CONTRACTS)
    require(run("rebase", "0.28.0"), REBASED)


def test_contracts_that_cannot_run(mini: Mini, run: Run) -> None:
    write_contracts(mini, {**CONTRACTS, "beta-fix": "cannot_run()"})
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), BROKEN, "did not run", "nothing is known")
    assert report(mini)["result"] == "broken"
    write_contracts(mini, CONTRACTS)
    require(run("rebase", "0.28.0"), REBASED)


def test_a_series_that_was_edited_since_is_recorded(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", {})
    require_error(run("rebase", "0.28.0", "--record"), "no series to record")
    require(run("rebase", "0.28.0"), REBASED)
    path = mini.root / "patches" / "v0.28.0" / PATCHES[2]
    path.write_text(path.read_text().replace("Users saw numbers that were too large.", "Nobody knows who saw it."))
    before = written(mini)
    require(run("rebase", "0.28.0", "--record"), REBASED)
    assert set(written(mini)) - set(before) == {"resolutions/v0.28.0/gamma-fix.patch"}
    assert {name: data for name, data in written(mini).items() if name in before} == before
    assert "diff --git" not in resolution(mini, "gamma-fix").read_text()
    require(run("rebase", "0.28.0", "--record"), NOTHING)
    require_settled(mini, run)


@pytest.mark.parametrize("option", ["--record", "--fresh"])
def test_a_series_that_is_edited_while_the_rebase_runs_is_not_overwritten(
    mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    later(mini, "0.28.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    path = mini.root / "patches" / "v0.28.0" / PATCHES[2]
    edited = path.read_text().replace("Users saw numbers that were too large.", "Nobody knows who saw it.")
    path.write_text(edited.replace("Nobody knows", "Few know"))
    once: list[str] = []

    def edit(*arguments: Any, **options: Any) -> Any:
        if not once:
            path.write_text(edited)
            once.append("edited")
        return patches(*arguments, **options)

    patches = publish.patches
    monkeypatch.setattr(publish, "patches", edit)
    before = written(mini)
    require_error(run("rebase", "0.28.0", option), "patches/v0.28.0 was changed while the rebase", "rebase again")
    assert path.read_text() == edited
    assert {name: data for name, data in written(mini).items() if "0003" not in name} == {
        name: data for name, data in before.items() if "0003" not in name
    }
    require(run("rebase", "0.28.0", "--record"), REBASED)
    assert path.read_text() == edited


def test_what_a_person_did_outlives_a_series_that_appeared_meanwhile(mini: Mini, run: Run, tmp_path: Path) -> None:
    file = conflict(mini, run)
    file.write_text(RESOLVED)
    series = mini.root / "patches" / "v0.28.0"
    shutil.copytree(mini.root / "patches" / "v0.27.1", series)
    require_error(run("rebase", "--continue"), "patches/v0.28.0 was changed", "build/rebase/v0.28.0/tree", "--take")
    # As the message says.
    shutil.copytree(work(mini) / "tree", tmp_path / "copy", symlinks=True)
    require(run("rebase", "--abort"), 0)
    shutil.rmtree(series)
    require(run("rebase", "0.28.0", "--take", tmp_path / "copy"), REBASED)
    assert "100 + x" in resolution(mini, "alpha-fix").read_text()


def test_commits_that_were_made_without_the_engine(mini: Mini, run: Run, tmp_path: Path) -> None:
    later(mini, "0.28.0", CONFLICT)
    require(run("rebase", "0.28.0"), PERSON)
    tree = tmp_path / "tree"
    shutil.copytree(work(mini) / "pristine", tree, symlinks=True)
    require(run("rebase", "--abort"), 0)
    trailers = f"Upstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}"
    beta: dict[str, str | None] = {"vllm/new.py": SPDX + "\nBETTER = True\n", "tests/test_beta.py": a_test("beta")}
    commit(tree, beta, f"[Model] Add new.py\n\nA.\n\nB.\n\nC.\n\nContract: beta-fix\n{trailers}")
    alpha: dict[str, str | None] = {"vllm/alpha.py": RESOLVED, "tests/test_alpha.py": a_test("alpha")}
    commit(tree, alpha, f"[Bugfix] Mend alpha.py\n\nA.\n\nB.\n\nC.\n\nContract: alpha-fix\n{trailers}")
    # Another release's tag beside the target's own is no hindrance.
    git(tree, "tag", "v0.28.0", "pristine")
    git(tree, "tag", "-f", "pristine", "HEAD")
    require(run("rebase", "0.28.0", "--take", tree), BROKEN, "lacks gamma-fix")
    require(run("rebase", "--abort"), 0)
    gamma: dict[str, str | None] = {
        "vllm/gamma.py": GAMMA.replace("x + 98", "x - 98"),
        "tests/test_gamma.py": a_test("gamma"),
    }
    text = f"[Bugfix] Mend gamma.py\n\nA.\n\nB.\n\nC.\n\nContract: gamma-fix\nDepends-On: alpha-fix\n{trailers}"
    commit(tree, gamma, text)
    require(run("rebase", "0.28.0", "--take", tree), REBASED)
    assert names(mini) == ["0001-beta-fix.patch", "0002-alpha-fix.patch", "0003-gamma-fix.patch"]
    assert "Depends-On: alpha-fix" in mail(mini, "0003-gamma-fix.patch")
    # The same change as the automatic merge's leaves only the message to record.
    assert "diff --git" not in resolution(mini, "gamma-fix").read_text()
    require_settled(mini, run)
    require_error(run("rebase", "0.28.0", "--take", tree, "--record"), "exclude each other")
    (tree / "more").write_text("more")
    require_error(run("rebase", "0.28.0", "--take", tree), "uncommitted changes")
    require_error(run("rebase", "0.28.0", "--take", mini.root), "no tag 'pristine'")


def test_a_git_ref(mini: Mini, run: Run, tmp_path: Path) -> None:
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    for name, text in (SOURCE | SHIFTED).items():
        (upstream / name).parent.mkdir(parents=True, exist_ok=True)
        (upstream / name).write_text(text)
    git(upstream, "init", "-q", ".")
    git(upstream, "add", "-A", "-f")
    git(upstream, "commit", "-q", "-m", "upstream")
    before = written(mini)
    require(run("rebase", "main", "--git", upstream), REBASED, "no release", "build/rebase/git-main/series")
    assert written(mini) == before
    series = work(mini, "git-main") / "series"
    assert sorted(p.name for p in series.iterdir()) == [*PATCHES, "series"]
    require(run("rebase", "main", "--git", upstream), NOTHING)
    (upstream / "vllm" / "alpha.py").write_text(CONFLICT["vllm/alpha.py"])
    git(upstream, "commit", "-q", "-a", "-m", "more")
    require(run("rebase", "main", "--git", upstream), PERSON)
    # Going on stays with the commit that the person saw.
    git(upstream, "commit", "-q", "--allow-empty", "-m", "yet more")
    (edited(mini, "git-main") / "vllm" / "alpha.py").write_text(RESOLVED)
    require(run("rebase", "main", "--git", upstream, "--continue"), REBASED)
    assert (work(mini, "git-main") / "resolutions" / "alpha-fix.patch").is_file()
    require(run("rebase", "main", "--git", upstream), NOTHING)
    require_error(run("rebase", "nowhere", "--git", upstream), "nowhere")


def test_a_folder(mini: Mini, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "vllm-next"
    for name, text in (SOURCE | FIXED).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("Version: 0.27.1", "Version: 0.28.0"))
    require(run("rebase", folder), REBASED, "build/rebase/vllm-next/series")
    assert states(mini, "vllm-next")["alpha-fix"] == "native"
    (folder / "vllm" / "gamma.py").write_text(GAMMA.replace("x + 98", "x - 98"))
    require(run("rebase", folder), REBASED)
    assert states(mini, "vllm-next")["gamma-fix"] == "native"


@pytest.mark.parametrize("near", ["0.27.1", "0.28.0"])
def test_what_has_no_version_is_carried_to_from_the_base_that_it_is_like(
    mini: Mini, run: Run, tmp_path: Path, near: str
) -> None:
    source = {"0.27.1": SOURCE, "0.28.0": later(mini, "0.28.0", SHIFTED)}[near]
    require(run("rebase", "0.28.0"), REBASED)
    folder = tmp_path / "somebodys"
    for name, text in {**source, "vllm/more.py": "", "vllm/gamma.py": SOURCE["vllm/gamma.py"] + "\n"}.items():
        if name != "PKG-INFO":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    told = require(run("rebase", folder), REBASED)
    assert f"nearest to vLLM {near}: 2 of the 3 files that its series changes are as there" in told.err
    assert {c["source"].split()[-1] for c in report(mini, "somebodys")["carried"]} == {near}
    # Unless somebody says where from.
    told = require(run("rebase", folder, "--from", "0.27.1"), NOTHING)
    assert "nearest to" not in told.err
    assert {c["source"].split()[-1] for c in report(mini, "somebodys")["carried"]} == {"0.27.1"}


def test_where_from(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", FIXED)
    later(mini, "0.29.0", {})
    require(run("rebase", "0.28.0"), REBASED)
    require(run("rebase", "0.29.0", "--from", "0.27.1"), REBASED)
    assert {c["source"].split()[-1] for c in report(mini, "v0.29.0")["carried"]} == {"0.27.1"}
    require_error(run("rebase", "0.29.0", "--from", "0.29.0"), "the target itself")
    require_error(run("rebase", "0.29.0", "--from", "0.20.0"), "no series for vLLM 0.20.0")


@pytest.mark.parametrize(
    ("wanted", "git_url", "name", "release", "url"),
    [
        ("0.28.0", None, "v0.28.0", "0.28.0", None),
        ("v0.28.0", None, "v0.28.0", "0.28.0", None),
        ("0.28.0rc1", None, "v0.28.0rc1", "0.28.0rc1", None),
        ("v0.28.0", "URL", "git-v0.28.0", None, "URL"),
        ("main", None, "git-main", None, targets.UPSTREAM),
        ("releases/v0.28", "URL", "git-releases-v0.28", None, "URL"),
        ("0123456789" * 4, "URL", "git-012345678901", None, "URL"),
    ],
)
def test_what_a_target_is(wanted: str, git_url: str | None, name: str, release: str | None, url: str | None) -> None:
    target = targets.parse(wanted, git_url)
    assert (target.name, target.release, target.git) == (name, release, url)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ((), 2, "name the target"),
        (("0.28.0", "--continue", "--abort"), 2, "exclude each other"),
        (("0.99.0",), 1, "no configured package index has an sdist of vLLM 0.99.0"),
        (("./nowhere",), 1, "no folder"),
        (("0.26.0",), 1, "no base is older"),
    ],
)
def test_wrong_usage(mini: Mini, run: Run, arguments: tuple[str, ...], code: int, word: str) -> None:
    before = written(mini)
    result = run("rebase", *arguments)
    assert result.code == code
    require_error(result, word)
    assert written(mini) == before


def test_the_report_goes_where_it_is_wanted(mini: Mini, run: Run, tmp_path: Path) -> None:
    later(mini, "0.28.0", CONFLICT)
    folder = tmp_path / "out" / "report"
    require(run("rebase", "0.28.0", "--report", folder), PERSON)
    for name in ("report.md", "report.json"):
        assert (folder / name).read_bytes() == (work(mini) / name).read_bytes()
    assert str(mini.root) not in (folder / "report.md").read_text()
    told = json.loads((folder / "report.json").read_text())
    assert [entry["step"] for entry in told["seconds"]] == [
        "source of vLLM 0.28.0",
        "contracts on pristine vLLM 0.28.0",
        "carrying patches",
    ]


def test_two_rebases_onto_one_target(mini: Mini, run: Run) -> None:
    from filelock import FileLock

    later(mini, "0.28.0", {})
    (mini.build / "rebase").mkdir(parents=True)
    with FileLock(mini.build / "rebase" / ".v0.28.0.lock"):
        require_error(run("rebase", "0.28.0"), "another rebase onto vLLM 0.28.0 is running")


@pytest.mark.parametrize("without", ["hashes", "size", "upload-time"])
def test_an_index_that_does_not_tell_all(mini: Mini, run: Run, quick: JsonIndex, without: str) -> None:
    later(mini, "0.28.0", {})
    quick.without = without
    require_error(run("rebase", "0.28.0"), "vllm-0.28.0", "simple API's JSON")
    assert not (mini.root / "patches" / "v0.28.0").exists()
