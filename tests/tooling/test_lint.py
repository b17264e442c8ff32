"""The lint says yes to a good series, and has a finding for each way in which one is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from k3patches.source import Sdist
from miniature import (
    AUTHOR,
    COMMITS,
    PATCHES,
    SDIST,
    SOURCE,
    SPDX,
    Mini,
    Run,
    a_test,
    commit,
    git,
    git_tree,
    message,
    require_error,
    require_ok,
    sdist_bytes,
)

CHECKS = [
    "numbering",
    "headers",
    "trailers",
    "scope",
    "whitespace",
    "spdx",
    "canonical form",
    "each prefix compiles",
    "upstream format",
    "applies with patch",
    "applies with quilt",
]
GOOD_TRAILERS = f"Contract: alpha-fix\nUpstream-Status: Pending [x]\nSigned-off-by: {AUTHOR}\n"
SUBJECT = "[Bugfix] Change what kept.py says"
BODY = "kept.py was wrong.\n\nUsers saw it.\n\nIt is right now."
FILES: dict[str, str | None] = {
    "vllm/kept.py": SOURCE["vllm/kept.py"].replace("x + 120", "x + 121"),
    "tests/test_delta.py": a_test("delta"),
}


def series_of(mini: Mini, run: Run, text: str, files: dict[str, str | None] = FILES) -> None:
    """Make the series the one commit of these ``files`` with the message ``text``."""
    tree = git_tree(mini.root / "work", ())
    commit(tree, files, text)
    require_ok(run("refresh", tree))


def edit(mini: Mini, number: int, old: str, new: str) -> None:
    path = mini.series_dir / PATCHES[number - 1]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def findings(mini: Mini, run: Run) -> dict[str, list[str]]:
    """The findings of a lint that has some, by check."""
    result = run("lint")
    require_error(result, "findings listed above", "run lint again")
    assert mini.leftovers() == []
    found: dict[str, list[str]] = {}
    for line in result.err.splitlines():
        if head := re.fullmatch(r"  ([a-z ]+): (ok|\d+ findings|SKIPPED.*)", line):
            found[head[1]] = []
        elif line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
    return {check: lines for check, lines in found.items() if lines}


def test_a_good_series(mini: Mini, run: Run) -> None:
    told = require_ok(run("lint")).err.splitlines()
    assert told == ["series of vLLM 0.27.1, 3 patches", *(f"  {check}: ok" for check in CHECKS)]
    assert mini.leftovers() == []
    assert not mini.tree.exists()


def test_what_a_killed_lint_left_is_removed(mini: Mini, run: Run) -> None:
    (mini.build / ".lint-0.27.1-killed" / "tree").mkdir(parents=True)
    require_ok(run("lint"))
    assert mini.leftovers() == []


def test_all_bases_are_told_one_after_the_other(mini: Mini, run: Run) -> None:
    later = shutil.copytree(mini.series_dir, mini.series_dir.with_name("v0.28.0"))
    toml = later / "base.toml"
    toml.write_text(toml.read_text().replace('release = "0.27.1"', 'release = "0.28.0"'))
    blocks = [["series of vLLM 0.27.1, 3 patches"], ["series of vLLM 0.28.0, 3 patches"]]
    told = require_ok(run("lint", "--all")).err.splitlines()
    assert [line for line in told if not line.startswith("  ")] == [line for block in blocks for line in block]
    assert len(told) == 2 * (1 + len(CHECKS))
    path = later / PATCHES[0]
    path.write_text(path.read_text().replace("Signed-off-by", "Seen-by"))
    result = run("lint", "--all")
    require_error(result, "findings listed above")
    first, second = result.err.split("series of vLLM 0.28.0")
    assert "findings" not in first
    assert f"{PATCHES[0]}: no Signed-off-by of its author" in second
    require_error(run("lint", "--all", "--base", "0.28.0"), "leave --base and other sources out")
    assert mini.leftovers() == []


def test_the_release_is_unpacked_once(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []
    unpack = Sdist.unpack

    def counted(self: Sdist, into: Path) -> None:
        unpacked.append(into)
        unpack(self, into)

    monkeypatch.setattr(Sdist, "unpack", counted)
    require_ok(run("lint"))
    require_ok(run("lint"))
    assert len(unpacked) == 1


def test_an_empty_series(mini: Mini, run: Run) -> None:
    require_ok(run("refresh", git_tree(mini.root / "work", ())))
    require_ok(run("lint"))


def test_tools_that_are_not_installed_are_named(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    only_git = mini.root / "bin"
    only_git.mkdir()
    (only_git / "git").symlink_to(str(shutil.which("git")))
    monkeypatch.setenv("PATH", str(only_git))
    told = require_ok(run("lint")).err
    assert "applies with quilt: SKIPPED, quilt is not installed" in told
    assert "applies with patch: SKIPPED, patch is not installed" in told


@pytest.mark.parametrize("numbers", [("0001", "0003", "0004"), ("0002", "0003", "0004"), ("0001", "0002", "0002")])
def test_numbering(mini: Mini, run: Run, numbers: tuple[str, ...]) -> None:
    names = [number + name[4:] for number, name in zip(numbers, PATCHES, strict=True)]
    for old, new in reversed(list(zip(PATCHES, names, strict=True))):
        (mini.series_dir / old).rename(mini.series_dir / new)
    (mini.series_dir / "series").write_text("".join(f"{name}\n" for name in names))
    odd = [name for place, name in enumerate(names, 1) if not name.startswith(f"{place:04d}")]
    found = findings(mini, run)
    assert list(found) == ["numbering"]
    assert [line.split()[0] for line in found["numbering"]] == odd


@pytest.mark.parametrize(
    ("subject", "body", "words"),
    [
        ("Change what kept.py says", BODY, "vLLM's style"),
        ("[bugfix] Change what kept.py says", BODY, "vLLM's style"),
        ("kept.py: change what it says", BODY, "vLLM's style"),
        ("[Bugfix] Mend", BODY, "vLLM's style"),
        (SUBJECT + " and everything else that it may ever say to anybody", BODY, "72 are the limit"),
        (SUBJECT, "kept.py was wrong.", "what was wrong"),
        (SUBJECT, BODY + "\n\n" + "a word " * 15 + "more", "longer than 72"),
    ],
)
def test_headers(mini: Mini, run: Run, subject: str, body: str, words: str) -> None:
    series_of(mini, run, f"{subject}\n\n{body}\n\n{GOOD_TRAILERS}")
    found = findings(mini, run)
    assert list(found) == ["headers"]
    assert words in found["headers"][0]
    assert PATCHES[0] in found["headers"][0]


def test_a_long_address_in_the_body_is_no_finding(mini: Mini, run: Run) -> None:
    link = "https://issues.example/" + "x" * 80
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{link}\n\n{GOOD_TRAILERS}")
    require_ok(run("lint"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Contract: alpha-fix", "Contract: nobody-knows-it", "test_nobody_knows_it.py"),
        ("Upstream-Status: Pending [x]\n", "", "Upstream-Status is wanted"),
        ("Pending [x]", "Pending", "Upstream-Status is wanted"),
        ("Pending [x]", "Someday [x]", "Upstream-Status is wanted"),
        ("Pending [x]", "Pending []", "Upstream-Status is wanted"),
        ("Upstream-Status", "Upstream-Status: Pending [y]\nUpstream-Status", "Upstream-Status is wanted"),
        (f"Signed-off-by: {AUTHOR}\n", "", "Signed-off-by of its author"),
        (AUTHOR, "Another <another@maintainers.example>", "Signed-off-by of its author"),
        ("Contract: alpha-fix", "Contract: alpha-fix\nChange-Id: 5", "unknown trailer Change-Id"),
        ("Contract: alpha-fix", "Contract: alpha-fix\nContracts: beta-fix", "unknown trailer Contracts"),
        ("Contract: alpha-fix", "Contract: alpha-fix\nand more", "'and more' stands among the trailers"),
    ],
)
def test_trailers(mini: Mini, run: Run, old: str, new: str, words: str) -> None:
    assert old in GOOD_TRAILERS
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS.replace(old, new)}")
    found = findings(mini, run)
    assert list(found) == ["trailers"]
    assert len(found["trailers"]) == 1
    assert words in found["trailers"][0]


def test_a_patch_for_no_fix(mini: Mini, run: Run) -> None:
    edit(mini, 3, "Contract: gamma-fix\n", "")
    found = findings(mini, run)
    assert list(found) == ["trailers"]
    assert "no Contract trailer" in found["trailers"][0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Contract: alpha-fix", "Contract: alpha-fix,\n beta-fix"),
        (f"Signed-off-by: {AUTHOR}", f"Signed-off-by: {AUTHOR}\n(cherry picked from commit {'0' * 40})"),
    ],
)
def test_trailers_as_git_reads_them(mini: Mini, run: Run, old: str, new: str) -> None:
    trailers = GOOD_TRAILERS.replace(old, new)
    assert trailers != GOOD_TRAILERS
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{trailers}")
    require_ok(run("lint"))


@pytest.mark.parametrize(
    "trailer",
    ["Upstream-Status: Submitted [https://upstream.example/pull/1]", "Upstream-Status: Inappropriate [a fork's own]"],
)
def test_all_words_for_the_upstream_status(mini: Mini, run: Run, trailer: str) -> None:
    text = f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS.replace('Upstream-Status: Pending [x]', trailer)}"
    series_of(mini, run, text + "Co-authored-by: B <b@maintainers.example>\n")
    require_ok(run("lint"))


def test_a_dependency_that_comes_later(mini: Mini, run: Run) -> None:
    edit(mini, 2, "Depends-On: alpha-fix", "Depends-On: gamma-fix")
    require_error(run("lint"), PATCHES[1], "gamma-fix")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({**FILES, "vllm/alpha.py": "# by the way\n"}, "vllm/alpha.py, which its message does not name"),
        ({"vllm/kept.py": FILES["vllm/kept.py"]}, "no test under tests/"),
    ],
)
def test_scope(mini: Mini, run: Run, files: dict[str, str | None], words: str) -> None:
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS}", files)
    found = findings(mini, run)
    assert list(found) == ["scope"]
    assert words in found["scope"][0]


@pytest.mark.parametrize("line", ["# at the end: \n", "# a tab: \t\n", "if True:\n \tpass\n"])
def test_whitespace(mini: Mini, run: Run, line: str) -> None:
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS}", {**FILES, "vllm/kept.py": SPDX + line})
    found = findings(mini, run)
    assert "vllm/kept.py" in found["whitespace"][0]


@pytest.mark.parametrize("head", ["", SPDX.splitlines()[0] + "\n", SPDX.splitlines()[1] + "\n"])
def test_spdx_lines_of_new_files(mini: Mini, run: Run, head: str) -> None:
    files = {**FILES, "tests/test_delta.py": a_test("delta").replace(SPDX, head).lstrip("\n")}
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS}", files)
    found = findings(mini, run)
    assert list(found) == ["spdx"]
    assert len(found["spdx"]) == 2 - head.count("\n")
    assert "tests/test_delta.py" in found["spdx"][0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+    return x + 100\n", "+    return x + 101\n"),
        ("2 files changed", "3 files changed"),
        ("Subject: [PATCH]", "Subject: [PATCH 1/3]"),
        ("Date: Sun, 1 Nov 2026", "Date: Sun,  1 Nov 2026"),
        ("\n---\n", "\n---\na note to oneself\n"),
    ],
)
def test_canonical_form(mini: Mini, run: Run, old: str, new: str) -> None:
    edit(mini, 1, old, new)
    found = findings(mini, run)
    assert list(found) == ["canonical form"]
    assert PATCHES[0] in found["canonical form"][0]
    assert "edited by hand" in found["canonical form"][0]


def test_a_rename_is_written_out(mini: Mini, run: Run) -> None:
    files = {"vllm/kept.py": None, "vllm/renamed.py": SOURCE["vllm/kept.py"], "tests/test_delta.py": a_test("delta")}
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\nrenamed.py.\n\n{GOOD_TRAILERS}", files)
    require_ok(run("lint"))
    path = mini.series_dir / PATCHES[0]
    assert "rename from" not in path.read_text()
    path.write_text(git(mini.root / "work", "format-patch", "-1", "--stdout", "--zero-commit", "-M"))
    assert "rename from" in path.read_text()
    assert "canonical form" in findings(mini, run)


def test_every_prefix_compiles(mini: Mini, run: Run) -> None:
    tree = git_tree(mini.root / "work", ())
    broken = {**COMMITS[0].files, "vllm/alpha.py": SOURCE["vllm/alpha.py"] + "\n\ndef q(:\n    pass\n"}
    commit(tree, broken, message(COMMITS[0]))
    # What the next patch mends is still broken in between.
    trailers = GOOD_TRAILERS.replace("alpha-fix", "beta-fix")
    mended = {"vllm/alpha.py": COMMITS[0].files["vllm/alpha.py"], "tests/test_beta.py": a_test("beta")}
    commit(tree, mended, f"[Bugfix] Mend alpha.py at last\n\nA.\n\nB.\n\nC.\n\n{trailers}")
    require_ok(run("refresh", tree))
    found = findings(mini, run)
    assert list(found) == ["each prefix compiles"]
    assert PATCHES[0] in found["each prefix compiles"][0]
    assert "vllm/alpha.py" in found["each prefix compiles"][0]


@pytest.mark.parametrize("text", ["import os\n", "x = {  'a':1 }\n"])
def test_upstreams_own_linters(mini: Mini, run: Run, text: str) -> None:
    series_of(mini, run, f"{SUBJECT}\n\n{BODY}\n\n{GOOD_TRAILERS}", {**FILES, "vllm/kept.py": f"{SPDX}\n{text}"})
    found = findings(mini, run)
    assert list(found) == ["upstream format"]
    assert "ruff" in found["upstream format"][0]


@pytest.mark.parametrize("shift", ["offset", "fuzz"])
def test_a_series_made_for_another_state_of_the_source(mini: Mini, run: Run, shift: str) -> None:
    text = SOURCE["vllm/alpha.py"]
    moved = {
        "offset": text.replace("\n\ndef a", "\n\n# one\n# more\n\ndef a"),
        "fuzz": text.replace("def d(", "def dd("),
    }
    mini.replace(SDIST, sdist_bytes({**SOURCE, "vllm/alpha.py": moved[shift]}))
    require_error(run("lint"), PATCHES[0], "offset" if shift == "offset" else "does not apply")
    assert mini.leftovers() == []


@pytest.mark.parametrize("tool", ["patch", "quilt"])
def test_a_tool_that_gives_another_tree(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """The comparison with git am's result is what is left to say when a tool claims success."""
    folder = mini.root / "bin"
    folder.mkdir()
    (folder / tool).write_text("#!/bin/sh\nexit 0\n")
    (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    found = findings(mini, run)
    assert any("git am give different vllm/alpha.py" in line for line in found[f"applies with {tool}"])


@pytest.mark.parametrize("tool", ["patch", "quilt"])
def test_a_tool_that_needed_fuzz(mini: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    folder = mini.root / "bin"
    folder.mkdir()
    (folder / tool).write_text("#!/bin/sh\necho 'Hunk #1 succeeded at 5 with fuzz 2 (offset 3 lines).'\nexit 0\n")
    (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert any("with fuzz 2" in line for line in findings(mini, run)[f"applies with {tool}"])
