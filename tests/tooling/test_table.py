"""The table fix x release: measured with made-up contracts, written, compared, and told when it is old."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from k3patches import contracts, series, status, status_run
from k3patches.contracts import Outcome, Verdict
from k3patches.git import git
from k3patches.status_readme import BEGIN, END
from miniature import PATCHES, RELEASE, Mini, Run, known, require_error, require_ok

README = f"# A project\n\n{BEGIN}\nold\n{END}\n\nThe rest.\n"
PASSES = Outcome(passed=1)
READS = "def text(config, name):\n    return (config.getoption('--tree') / 'vllm' / name).read_text()\n\n\n"
TREE_TEST = READS + "def test_it(pytestconfig):\n    assert {} in text(pytestconfig, {!r})\n"


# Has no test where the series is not.
ONLY_PATCHED = """\
import sys
from pathlib import Path

tree = Path(sys.argv[sys.argv.index("--tree") + 1])
if (tree / "vllm" / "new.py").is_file():

    def test_it():
        pass
"""


def contract(mini: Mini, fix: str, text: str) -> Path:
    path = mini.root / "tests" / "contracts" / contracts.contract_file(fix)
    path.write_text(text)
    return path


@pytest.fixture
def measured(mini: Mini) -> Mini:
    """A miniature with three fixes of its series, one that is native and one that is absent."""
    contract(mini, "alpha-fix", TREE_TEST.format("'x + 100\\n\\n\\ndef d'", "alpha.py"))
    contract(mini, "beta-fix", TREE_TEST.format("'NEW = True'", "new.py"))
    contract(mini, "gamma-fix", TREE_TEST.format("'x - 98'", "gamma.py"))
    contract(mini, "delta-fix", TREE_TEST.format("'x + 120'", "kept.py"))
    contract(mini, "epsilon-fix", "import pytest\n\n\ndef test_it():\n    pytest.skip('absent: no such thing')\n")
    (mini.root / "README.md").write_text(README)
    known(mini, "alpha-fix", "beta-fix", "gamma-fix", "delta-fix", "epsilon-fix")
    return mini


def json_file(mini: Mini) -> Path:
    return mini.root / "patches" / "status.json"


def states(mini: Mini, release: str = RELEASE) -> dict[str, str]:
    entry: dict[str, Any] = json.loads(json_file(mini).read_text())["bases"][release]["fixes"]
    return {fix: told["state"] for fix, told in entry.items()}


def add_base(mini: Mini, release: str, **tables: dict[str, str]) -> Path:
    """Another release with the same source, and an empty series."""
    folder = mini.root / "patches" / f"v{release}"
    folder.mkdir()
    text = (mini.series_dir / "base.toml").read_text().replace(f'release = "{RELEASE}"', f'release = "{release}"')
    for name, entries in tables.items():
        text += f"\n[{name}]\n" + "".join(f'{fix} = "{since}"\n' for fix, since in entries.items())
    (folder / "base.toml").write_text(text)
    (folder / "series").write_text("# nothing is needed\n")
    return folder


def test_the_table_and_its_counts_are_written_and_stay(measured: Mini, run: Run) -> None:
    require_ok(run("table"))
    assert states(measured) == {
        "alpha-fix": "patched",
        "beta-fix": "patched",
        "delta-fix": "native",
        "epsilon-fix": "absent",
        "gamma-fix": "patched",
    }
    told = json.loads(json_file(measured).read_text())
    assert told["revision"] == 7
    alpha = told["bases"][RELEASE]["fixes"]["alpha-fix"]
    assert alpha["patches"] == [PATCHES[0]]
    assert (alpha["pristine"]["failed"], alpha["patched"]["passed"], alpha["patched"]["failed"]) == (1, 1, 0)
    readme = (measured.root / "README.md").read_text()
    assert f"| fix | {RELEASE} |\n|---|---|\n| `alpha-fix` | patched |\n" in readme
    assert "| `epsilon-fix` | absent |" in readme
    assert "old" not in readme
    assert readme.startswith("# A project\n")
    assert readme.endswith("The rest.\n")
    before = json_file(measured).read_bytes(), readme
    require_ok(run("table"))
    require_ok(run("table", "--check"))
    require_ok(run("table", "--current"))
    assert (json_file(measured).read_bytes(), (measured.root / "README.md").read_text()) == before
    assert not measured.leftovers()


def test_a_base_is_a_folder_and_a_fix_is_a_file(measured: Mini, run: Run) -> None:
    for fix in ("alpha-fix", "beta-fix", "gamma-fix"):
        (measured.root / "tests" / "contracts" / contracts.contract_file(fix)).unlink()
    known(measured, "delta-fix", "epsilon-fix")
    for release in ("0.28.0", "0.27.9"):
        add_base(measured, release, native={"delta-fix": RELEASE}, absent={"epsilon-fix": release})
    shutil.rmtree(measured.series_dir)
    require_ok(run("table"))
    assert states(measured, "0.28.0") == {"delta-fix": "native", "epsilon-fix": "absent"}
    contract(measured, "zeta-fix", "def test_it():\n    pass\n")
    known(measured, "delta-fix", "epsilon-fix", "zeta-fix")
    require_error(run("table", "--current"), "0.28.0: the contracts changed since")
    require_ok(run("table", "--thorough"))
    assert states(measured, "0.28.0") == {"delta-fix": "native", "epsilon-fix": "absent", "zeta-fix": "native"}
    assert "| fix | 0.27.9 | 0.28.0 |" in (measured.root / "README.md").read_text()


def test_one_base_alone_leaves_the_others_results(measured: Mini, run: Run) -> None:
    require_ok(run("table"))
    folder = add_base(measured, "0.28.0")
    require_error(run("table", "--current"), "0.28.0 was not measured")
    # With the same source and no patch it is broken, which leaves all as it was.
    before = json_file(measured).read_bytes()
    require_error(run("table", "--base", "0.28.0"), "vLLM 0.28.0: alpha-fix is broken (1 failed)", "nothing is written")
    assert json_file(measured).read_bytes() == before
    for path in measured.series_dir.glob("*.patch"):
        shutil.copy2(path, folder)
    shutil.copy2(measured.series_dir / "series", folder)
    require_ok(run("table", "--base", "0.28.0"))
    assert states(measured) == states(measured, "0.28.0")
    require_ok(run("table", "--current"))
    require_error(run("table", "--base", "9.9"), "no series for vLLM 9.9")


def test_what_is_broken_is_an_error_and_written_only_on_request(measured: Mini, run: Run) -> None:
    contract(measured, "gamma-fix", "def test_it():\n    assert 'a made-up reason' == ''\n")
    result = run("table")
    require_error(result, f"vLLM {RELEASE}: gamma-fix is broken (1 failed)", "nothing is written")
    assert "a made-up reason" in result.err
    assert "contracts-patched.log" in result.err
    assert not json_file(measured).exists()
    assert (measured.root / "README.md").read_text() == README
    require_error(run("table", "--check"), "gamma-fix is broken")
    require_error(run("table", "--write-broken"), "gamma-fix is broken", "written nevertheless")
    assert states(measured)["gamma-fix"] == "broken"
    assert "| `gamma-fix` | **broken** |" in (measured.root / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def test_it():\n    pass\n", "beta-fix holds without its patch (native)"),
        ("import pytest\n\n\ndef test_it():\n    pytest.skip('absent: it')\n", "holds without its patch (absent)"),
        ("import pytest\n\n\ndef test_it():\n    pytest.skip('another reason')\n", "is broken (1 skipped)"),
        ("import no_such_module\n", "is broken (1 failed)"),
        ("# no test\n", "is broken (nothing ran"),
        (ONLY_PATCHED, "is broken (nothing ran on the pristine tree)"),
    ],
)
def test_a_contract_that_proves_nothing_is_an_error(measured: Mini, run: Run, text: str, words: str) -> None:
    contract(measured, "beta-fix", text)
    message = require_error(run("table"), words)
    # It is an error of that contract alone.
    assert message.count(f"vLLM {RELEASE}: ") == 1
    require_error(run("contracts", "--fix", "beta-fix"), words)


def test_what_base_toml_records_must_hold(measured: Mini, run: Run) -> None:
    toml = measured.series_dir / "base.toml"
    toml.write_text(toml.read_text() + f'\n[native]\ndelta-fix = "{RELEASE}"\nepsilon-fix = "{RELEASE}"\n')
    require_error(run("table"), "epsilon-fix is absent, but base.toml says native")
    toml.write_text(toml.read_text().replace("epsilon", "alpha"))
    require_error(run("table"), "alpha-fix is patched, but base.toml says native")


def test_each_patch_must_do_its_job_without_the_later_ones(measured: Mini, run: Run) -> None:
    contract(measured, "beta-fix", TREE_TEST.format("'x - 98'", "gamma.py"))
    marked = "import pytest\n\n\n@pytest.mark.cpu_test\ndef test_it():\n    assert {}\n"
    require_ok(run("table"))
    mine = measured.root / "upstream"
    (mine / "tests" / "test_gamma.py").write_text(marked.format("True"))
    git("commit", "-q", "-a", "--amend", "--no-edit", cwd=mine)
    require_ok(run("refresh", mine))
    result = run("table", "--thorough")
    require_error(result, f"up to {PATCHES[1]}, beta-fix (1 failed) does not hold")
    assert f"up to {PATCHES[0]}," not in result.err.splitlines()[-1]
    assert "patches' own tests: 1 passed" in result.err
    (mine / "tests" / "test_gamma.py").write_text(marked.format("'the made-up reason' == ''"))
    git("commit", "-q", "-a", "--amend", "--no-edit", cwd=mine)
    require_ok(run("refresh", mine))
    result = run("table", "--thorough")
    require_error(result, "tests that the patches carry fail")
    assert "the made-up reason" in result.err
    assert not list((measured.build / f"v{RELEASE}").glob("*prefix*"))


def test_the_tree_of_a_prefix_is_the_series_up_to_it(measured: Mini, run: Run) -> None:
    require_ok(run("apply"))
    folder = measured.build / "prefix"
    changed = ("x + 100", "alpha.py"), ("NEW", "new.py"), ("x - 98", "gamma.py")
    present = []
    for tree in status_run.prefixes(measured.tree, folder):
        assert tree == folder
        files = [(text, tree / "vllm" / name) for text, name in changed]
        present.append([path.is_file() and text in path.read_text() for text, path in files])
    # The last one is the patched tree itself.
    assert present == [[True, False, False], [True, True, False]]
    assert not folder.exists()
    # The patched tree is still what apply made.
    require_ok(run("apply"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mini: mini.series_dir.joinpath("series").write_text("\n".join(PATCHES[:2])), "its series changed"),
        (lambda mini: contract(mini, "beta-fix", "# no test\n"), "the contracts changed"),
        (lambda mini: mini.root.joinpath("tests", "contracts", "shared.py").write_text("X = 1\n"), "the contracts"),
        (lambda mini: mini.root.joinpath("VERSION").write_text(f"{RELEASE}+k3.8\n"), "the revision was 7 and is 8"),
        (lambda mini: mini.root.joinpath("README.md").write_text(README), "README.md"),
        (lambda mini: json_file(mini).unlink(), "status.json is not there"),
        (lambda mini: json_file(mini).write_text("{}"), "is no status table"),
        (lambda mini: json_file(mini).write_text("[1"), "is no status table"),
        (
            lambda mini: json_file(mini).write_text(json_file(mini).read_text().replace("native", "patched")),
            "no status",
        ),
    ],
)
def test_an_old_table_is_told_without_running_anything(
    measured: Mini, run: Run, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    # How they do is not what this is about.
    alike = {"delta-fix": (PASSES, PASSES)}

    def pretend(folder: Path, fixes: list[str], tree: Path, python: str, **options: Any) -> dict[str, Outcome]:
        return {fix: alike.get(fix, (Outcome(failed=1), PASSES))[tree.name == "patched"] for fix in fixes}

    monkeypatch.setattr(contracts, "run", pretend)
    require_ok(run("table"))
    change(measured)
    if "series" in words:
        (measured.series_dir / PATCHES[2]).unlink()
    monkeypatch.setattr(contracts, "run", lambda *a, **k: pytest.fail("a contract was run"))
    require_error(run("table", "--current"), words, "ci/status.sh")


def test_check_compares_behaviour_and_writes_nothing(measured: Mini, run: Run) -> None:
    require_error(run("table", "--check"), "status.json is not there")
    require_ok(run("table"))
    contract(measured, "delta-fix", TREE_TEST.format("'x + 120'", "kept.py") + "\n\ndef test_more():\n    pass\n")
    before = json_file(measured).read_bytes()
    require_error(
        run("table", "--check"), "delta-fix was native (pristine 1 passed;", "and is native (pristine 2 passed;"
    )
    assert json_file(measured).read_bytes() == before
    # What that run measured can be written without another one.
    measured_now = measured.build / "status.json"
    require_ok(run("table", "--from", measured_now))
    require_ok(run("table", "--current"))
    assert json_file(measured).read_bytes() == measured_now.read_bytes()
    contract(measured, "delta-fix", "def test_it():\n    pass\n")
    require_error(run("table", "--from", measured_now), "is not of today", "the contracts changed")


def test_another_place_for_the_json(measured: Mini, run: Run) -> None:
    place = measured.root / "elsewhere.json"
    require_ok(run("table", "--json", place))
    assert list(status.read(place).columns) == [RELEASE]
    assert not json_file(measured).exists()
    # README.md has the table of patches/status.json.
    assert (measured.root / "README.md").read_text() == README
    # What the nightly run measures with: one base, also where it is broken.
    add_base(measured, "0.28.0")
    place.unlink()
    result = run("table", "--base", "0.28.0", "--json", place, "--write-broken")
    require_error(result, "alpha-fix is broken", "written nevertheless")
    assert list(status.read(place).columns) == ["0.28.0"]
    assert (measured.root / "README.md").read_text() == README


def test_without_markers_nothing_is_written(measured: Mini, run: Run) -> None:
    (measured.root / "README.md").write_text("# A project\n")
    require_error(run("table"), "README.md needs one line")
    assert not json_file(measured).exists()


@pytest.mark.parametrize(
    "arguments", [("--check", "--current"), ("--current", "--thorough"), ("--from", "x", "--base", "1")]
)
def test_options_that_exclude_each_other(measured: Mini, run: Run, arguments: tuple[str, ...]) -> None:
    require_error(
        run("table", *arguments),
        "leave them out" if "--thorough" in arguments or "--base" in arguments else "one of them",
    )


def test_an_interpreter_that_cannot_run_contracts(measured: Mini, run: Run, tmp_path: Path) -> None:
    require_error(run("table", "--python", tmp_path / "none"), "does not start", "--python")
    (tmp_path / "python").write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    require_error(run("table", "--python", tmp_path / "python"), "no torch here", "ci/status.sh")


SEVERAL = """\
import pytest


@pytest.fixture(scope="module")
def shared():
    yield 1


@pytest.mark.parametrize("n", range(6))
def test_numbers(shared, n):
    assert n != {wrong}
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_contract_that_cannot_be_imported_stops_no_other(measured: Mini, jobs: int) -> None:
    folder = measured.root / "tests" / "contracts"
    contract(measured, "alpha-fix", "import no_such_module\n")
    contract(measured, "beta-fix", "def test_it():\n    pass\n")
    found = contracts.run(folder, ["alpha-fix", "beta-fix"], measured.root, sys.executable, jobs=jobs)
    assert found == {"alpha-fix": Outcome(failed=1), "beta-fix": Outcome(passed=1)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_contract_can_end_at_its_first_failure(measured: Mini, jobs: int) -> None:
    folder = measured.root / "tests" / "contracts"
    contract(measured, "alpha-fix", SEVERAL.format(wrong=2))
    contract(measured, "beta-fix", SEVERAL.format(wrong=7))
    fixes = ["alpha-fix", "beta-fix", "epsilon-fix"]
    found = contracts.run(folder, fixes, measured.root, sys.executable, jobs=jobs, stop_at_first_failure=True)
    assert found == {
        "alpha-fix": Outcome(passed=2, failed=1, not_run=3),
        "beta-fix": Outcome(passed=6),
        "epsilon-fix": Outcome(absent=1),
    }
    assert str(found["alpha-fix"]) == "at least 2 passed, 1 failed, 3 not run"
    assert not found["alpha-fix"].holds
    whole = contracts.run(folder, fixes, measured.root, sys.executable, jobs=jobs)
    assert whole["alpha-fix"] == Outcome(passed=5, failed=1)


def test_differences_name_what_came_and_went(measured: Mini) -> None:
    inputs = status.Inputs("c", "2.13.0", "0", "1", "2")
    holds, fails = Outcome(passed=1), Outcome(failed=1)
    before = status.Table(
        1, {}, {"1.0": status.Column(inputs, [Verdict("a", holds, holds), Verdict("b", fails, holds)])}
    )
    after = status.Table(
        1,
        {},
        {
            "1.0": status.Column(inputs, [Verdict("a", fails, holds), Verdict("c", holds, holds)]),
            "2.0": status.Column(inputs, []),
        },
    )
    found = status.differences(before, after)
    assert len(found) == 4, found
    assert found[0].startswith("1.0: a was native (")
    assert found[1:] == ["1.0: c is missing", "1.0: b has no contract", "2.0 is missing"]
    assert not status.differences(after, after)


def test_a_series_digest_heeds_content_and_order(measured: Mini) -> None:
    patches = series.load(measured.series_dir)
    assert status.series_digest(patches) == status.series_digest(series.load(measured.series_dir))
    assert status.series_digest(patches) != status.series_digest(patches[::-1])
    assert status.series_digest(patches) != status.series_digest(patches[:2])
