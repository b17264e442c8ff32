"""The patched tree and the way back from its commits to the series."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from miniature import (
    COMMITS,
    PATCHES,
    RELEASE,
    SOURCE,
    Mini,
    Run,
    a_test,
    commit,
    git,
    message,
    require_error,
    require_ok,
)

SUBJECTS = [entry.subject for entry in COMMITS]


def subjects(tree: Path) -> list[str]:
    return git(tree, "log", "--reverse", "--format=%s").splitlines()


def series_bytes(mini: Mini) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in mini.series_dir.iterdir()}


def age(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_one_commit_a_patch_on_the_pristine_source(mini: Mini, run: Run) -> None:
    assert require_ok(run("apply")).out == f"{mini.tree}\n"
    assert subjects(mini.tree) == [f"vLLM {RELEASE}, pristine", *SUBJECTS]
    assert git(mini.tree, "describe", "--tags", "HEAD~3").strip() == "pristine"
    assert git(mini.tree, "status", "--porcelain", "--ignored") == ""
    assert git(mini.tree, "show", "pristine:vllm/_version.py") == SOURCE["vllm/_version.py"]
    assert git(mini.tree, "log", "-1", "--format=%an <%ae> %aI") == (
        "A Developer <dev@maintainers.example> 2026-11-01T12:00:00+00:00\n"
    )


def test_the_same_series_gives_the_same_commits(mini: Mini, run: Run) -> None:
    require_ok(run("apply"))
    first = git(mini.tree, "rev-list", "HEAD")
    shutil.rmtree(mini.tree)
    require_ok(run("apply"))
    assert git(mini.tree, "rev-list", "HEAD") == first


def test_applying_again_changes_nothing(built: Mini, run: Run) -> None:
    before = age(built.tree), age(built.tree / "vllm" / "alpha.py")
    require_ok(run("apply"))
    assert (age(built.tree), age(built.tree / "vllm" / "alpha.py")) == before
    require_ok(run("apply", "--until", "0002"))
    assert age(built.tree) != before[0]
    assert subjects(built.tree)[1:] == SUBJECTS[:2]


def test_a_changed_patch_is_applied_anew(built: Mini, run: Run) -> None:
    before = age(built.tree)
    path = built.series_dir / PATCHES[2]
    path.write_text(path.read_text().replace("Users saw numbers", "People saw numbers"))
    require_ok(run("apply"))
    assert age(built.tree) != before
    assert "People saw" in git(built.tree, "log", "-1", "--format=%b")


def test_a_wheel_of_an_outdated_tree_is_not_made(built: Mini, run: Run) -> None:
    path = built.series_dir / PATCHES[2]
    path.write_text(path.read_text().replace("Users saw numbers", "People saw numbers"))
    before = built.contents()
    require_error(run("wheel", "--arch", "x86_64"), "another state of the series", "run apply again")
    assert built.contents() == before


def test_a_series_may_be_empty(mini: Mini, run: Run) -> None:
    (mini.series_dir / "series").write_text("# nothing yet\n")
    for name in PATCHES:
        (mini.series_dir / name).unlink()
    require_ok(run("apply"))
    assert len(subjects(mini.tree)) == 1


@pytest.mark.parametrize("shift", ["offset", "fuzz", "conflict"])
def test_patches_fit_exactly_or_not_at_all(mini: Mini, run: Run, tmp_path: Path, shift: str) -> None:
    folder = tmp_path / "source"
    shutil.copytree(mini.root / "upstream", folder, ignore=shutil.ignore_patterns(".git"))
    for name, content in SOURCE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    alpha = folder / "vllm" / "alpha.py"
    (folder / "tests" / "test_alpha.py").unlink()
    text = SOURCE["vllm/alpha.py"]
    alpha.write_text(
        {
            "offset": text.replace("\n\ndef a", "\n\n# moved down by this line\n\ndef a"),
            "fuzz": text.replace("def d(", "def dd("),
            "conflict": text.replace("x + 99", "x + 199"),
        }[shift]
    )
    word = "offset" if shift == "offset" else "does not apply"
    like = "this source is not vLLM 0.27.1: 1 of the 3 files", "(vllm/alpha.py)", "ci/rebase.sh"
    require_error(run("apply", "--source-dir", folder), *like, PATCHES[0], word)
    assert not mini.tree.exists()
    assert mini.leftovers() == []


def test_somebodys_edits_are_not_lost(built: Mini, run: Run) -> None:
    (built.tree / "vllm" / "alpha.py").write_text("# three days of work\n")
    before = built.contents()
    for command in (("apply",), ("apply", "--until", "0001"), ("build",), ("wheel",), ("contracts",)):
        require_error(run(*command), str(built.tree), "save them")
    assert before.items() <= built.contents().items()


def test_somebodys_commits_are_not_lost(built: Mini, run: Run) -> None:
    commit(built.tree, {"vllm/kept.py": "# work\n"}, "work")
    require_error(run("apply", "--until", "0001"), str(built.tree), "save them")
    assert subjects(built.tree)[-1] == "work"


@pytest.mark.parametrize("where", ["branch", "stash", "new file"])
def test_work_that_is_put_aside_is_not_lost(built: Mini, run: Run, where: str) -> None:
    if where == "branch":
        git(built.tree, "checkout", "-q", "-b", "work")
        commit(built.tree, {"vllm/kept.py": "# work\n"}, "work")
        git(built.tree, "checkout", "-q", "main")
    elif where == "stash":
        (built.tree / "vllm" / "kept.py").write_text("# work\n")
        git(built.tree, "stash", "-q")
    else:
        (built.tree / "notes.txt").write_text("work\n")
    require_error(run("apply", "--until", "0001"), str(built.tree), "save them")
    assert built.tree.exists()


@pytest.mark.parametrize("damage", ["no state", "no json", "no repository"])
def test_a_tree_that_is_not_ours_is_left_alone(built: Mini, run: Run, damage: str) -> None:
    state = built.tree / ".git" / "k3-state.json"
    if damage == "no state":
        state.unlink()
    elif damage == "no json":
        state.write_text('{"source": ')
    else:
        (built.tree / ".git" / "HEAD").unlink()
    require_error(run("apply"), str(built.tree))
    assert (built.tree / "vllm" / "alpha.py").is_file()


def test_apply_and_refresh_are_a_round_trip(mini: Mini, run: Run) -> None:
    before = series_bytes(mini)
    require_ok(run("apply"))
    assert require_ok(run("refresh", mini.tree)).out.splitlines() == list(PATCHES)
    assert series_bytes(mini) == before
    assert before["series"].decode().splitlines() == ["# the series of the miniature", *PATCHES]
    assert mini.leftovers() == []


def test_refresh_does_not_depend_on_the_day_or_the_users_git(mini: Mini, tmp_path: Path) -> None:
    before = series_bytes(mini)
    config = tmp_path / ".gitconfig"
    config.write_text(
        "[format]\n\tsignature = me\n\tsubjectPrefix = RFC\n\tattach = x\n[diff]\n\tnoprefix = true\n\tcontext = 9\n"
        "[core]\n\tabbrev = 6\n\tautocrlf = true\n[commit]\n\tgpgSign = true\n[color]\n\tui = always\n"
    )
    env = {"HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": str(config), "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    require_ok(mini.outside("refresh", "upstream", env=env))
    assert series_bytes(mini) == before
    require_ok(mini.outside("apply", env=env))
    assert subjects(mini.tree)[1:] == SUBJECTS


def test_refresh_writes_what_ordinary_git_made(mini: Mini, run: Run) -> None:
    upstream = mini.root / "upstream"
    (mini.series_dir / "NOTES.md").write_text("what a maintainer wants to remember\n")
    trailers = "Contract: delta-fix\nUpstream-Status: Pending [x]\nSigned-off-by: X <x@maintainers.example>\n"
    text = f"[Bugfix][Model] Näme it\n\nWas wrong.\n\n{trailers}"
    commit(upstream, {"vllm/kept.py": "# ümlaut\n", "tests/test_delta.py": a_test("delta")}, text)
    names = require_ok(run("refresh", upstream)).out.splitlines()
    assert names == [*PATCHES, "0004-delta-fix.patch"]
    assert (mini.series_dir / "NOTES.md").is_file()
    require_ok(run("apply"))
    assert subjects(mini.tree)[-1] == "[Bugfix][Model] Näme it"
    git(upstream, "reset", "-q", "--hard", "HEAD~2")
    assert require_ok(run("refresh", upstream)).out.splitlines() == list(PATCHES[:2])
    assert sorted(series_bytes(mini)) == sorted([*PATCHES[:2], "series", "base.toml", "NOTES.md"])


@pytest.mark.parametrize("case", ["uncommitted", "merge", "no tag", "no tree", "no contract"])
def test_refresh_refuses_and_keeps_the_series(mini: Mini, run: Run, case: str) -> None:
    upstream, before = mini.root / "upstream", series_bytes(mini)
    words: tuple[str, ...] = ("commit or rebase",)
    if case == "uncommitted":
        (upstream / "vllm" / "kept.py").write_text("# work\n")
    elif case == "merge":
        git(upstream, "checkout", "-q", "-b", "side", "HEAD~1")
        commit(upstream, {"vllm/kept.py": "# side\n"}, message(COMMITS[0]))
        git(upstream, "merge", "-q", "main", "-m", "merge")
    elif case == "no tag":
        git(upstream, "tag", "-d", "pristine")
        words = ("tag 'pristine'", str(upstream))
    elif case == "no tree":
        upstream, words = mini.root / "nowhere", ("nowhere",)
    else:
        commit(
            upstream, {"vllm/kept.py": "# x\n"}, "[Bugfix] Without a trailer\n\nWhy.\n\nSigned-off-by: X <x@y.example>"
        )
        words = ("Contract", "[Bugfix] Without a trailer")
    require_error(run("refresh", upstream), *words)
    assert series_bytes(mini) == before
    assert mini.leftovers() == []


def test_executable_bits_and_links_of_the_source_are_kept(mini: Mini, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(mini.root / "upstream", folder, ignore=shutil.ignore_patterns(".git"))
    git(mini.root / "upstream", "checkout", "-q", "pristine")
    shutil.rmtree(folder)
    shutil.copytree(mini.root / "upstream", folder, ignore=shutil.ignore_patterns(".git"))
    (folder / "setup.py").chmod(0o755)
    (folder / "link").symlink_to("setup.py")
    require_ok(run("apply", "--source-dir", folder))
    assert os.access(mini.tree / "setup.py", os.X_OK)
    assert (mini.tree / "link").readlink() == Path("setup.py")
