"""The tracking page: where each fix stands, by the status table and by what is known of upstream."""

from __future__ import annotations

from pathlib import Path

import fake_status
import pytest
from k3patches import contracts, status, tracking
from k3patches.pr import page as pull_requests
from k3patches.project import Project
from k3patches.status_readme import BEGIN, END
from miniature import COMMITS, RELEASE, ROOT, Mini, Run, known, require_error, require_ok

FIXES = [entry.fix for entry in COMMITS]


def add_base(mini: Mini, release: str, without: str) -> None:
    """A later release with the same series, less the patch of one fix."""
    folder = mini.root / "patches" / f"v{release}"
    folder.mkdir()
    for path in mini.series_dir.iterdir():
        if f"-{without}." not in path.name:
            text = path.read_text().replace(f'release = "{RELEASE}"', f'release = "{release}"')
            (folder / path.name).write_text("\n".join(x for x in text.split("\n") if f"-{without}." not in x))


@pytest.fixture
def tracked(mini: Mini) -> Mini:
    """Three releases: gamma-fix is native on the last two, beta-fix in the middle alone."""
    add_base(mini, "0.28.0", "gamma-fix")
    add_base(mini, "0.29.0", "gamma-fix")
    series = mini.root / "patches" / "v0.28.0" / "series"
    series.write_text(series.read_text().replace("0002-beta-fix.patch\n", ""))
    (series.parent / "0002-beta-fix.patch").unlink()
    columns: dict[str, status.Column] = {}
    for release in Project(mini.root).releases:
        table = fake_status.measure(mini.root, release, {})
        columns |= table.columns
    (mini.root / "patches" / "status.json").write_text(status.Table(7, table.ran_on, columns).to_json())
    (mini.root / "README.md").write_text(f"{BEGIN}\n{END}\n")
    return mini


def section(mini: Mini, fix: str) -> str:
    text = (mini.root / "patches" / "TRACKING.md").read_text()
    return text.partition(f"\n## {fix}\n")[2].partition("\n## ")[0]


def test_each_fix_has_its_states_patches_and_end(tracked: Mini, run: Run) -> None:
    require_ok(run("table", "--pages"))
    alpha = section(tracked, "alpha-fix")
    patch = "[0001-alpha-fix.patch](v0.29.0/0001-alpha-fix.patch)"
    assert f"| 0.29.0 | patched | {patch} | Pending [not yet submitted] |" in alpha
    assert "The patch goes with the first release after 0.29.0 that passes" in alpha
    beta = section(tracked, "beta-fix")
    assert "| 0.28.0 | native |  |  |" in beta
    assert "It was native on 0.28.0 and is needed again since." in beta
    assert "Native since 0.28.0, where the patch has gone" in section(tracked, "gamma-fix")
    page = (tracked.root / "patches" / "TRACKING.md").read_text()
    assert "| [`alpha-fix`](#alpha-fix) | 0.27.1 to 0.29.0 | none |" in page
    assert "| [`beta-fix`](#beta-fix) | 0.27.1, 0.29.0 | 0.28.0 |" in page
    require_ok(run("table", "--current"))


def test_what_is_known_of_upstream_is_linked(tracked: Mini, run: Run) -> None:
    place = tracked.root / "patches" / "pr" / "known.toml"
    place.write_text(place.read_text().replace("[beta-fix]\n", '[beta-fix]\npull.12 = "the same"\nissue.7 = "seen"\n'))
    require_ok(run("table", "--pages"))
    beta = section(tracked, "beta-fix")
    assert "- pull request [12](https://github.com/vllm-project/vllm/pull/12): the same\n" in beta
    assert "- issue [7](https://github.com/vllm-project/vllm/issues/7): seen\n" in beta
    assert "nothing on the same ground is known" in section(tracked, "alpha-fix")


def test_a_page_that_is_not_todays_is_told(tracked: Mini, run: Run) -> None:
    require_error(run("table", "--current"), "README.md", "ci/status.sh --pages")
    require_ok(run("table", "--pages"))
    known(tracked, *FIXES)
    place = tracked.root / "patches" / "pr" / "known.toml"
    place.write_text(place.read_text() + 'issue.7 = "seen"\n')
    require_error(run("table", "--current"), "TRACKING.md", "ci/status.sh --pages")
    (tracked.root / "patches" / "TRACKING.md").unlink()
    require_error(run("table", "--current"), "TRACKING.md", "ci/status.sh --pages")


@pytest.mark.parametrize(
    ("fixes", "words"),
    [(FIXES[:2], ("no table for gamma-fix", "[gamma-fix]")), ([*FIXES, "delta-fix"], ("delta-fix, which is no fix",))],
)
def test_every_fix_has_its_entry_and_no_other(
    tracked: Mini, run: Run, fixes: list[str], words: tuple[str, ...]
) -> None:
    known(tracked, *fixes)
    require_error(run("table", "--pages"), "known.toml", *words)
    # Before anything is run.
    require_error(run("table", "--python", "/nowhere/python"), "known.toml", *words)


@pytest.mark.parametrize("line", ['harm = "an error"\n', 'symptom = "It ends."\n'])
def test_every_fix_says_what_users_have_without_it(tracked: Mini, run: Run, line: str) -> None:
    place = tracked.root / "patches" / "pr" / "known.toml"
    place.write_text(place.read_text().replace(f"[beta-fix]\n{line}", "[beta-fix]\n").replace(line, "", 1))
    require_error(run("table", "--pages"), "known.toml", "without", "a symptom", '"wrong numbers"')


def test_a_harm_that_is_none_is_told(tracked: Mini, run: Run) -> None:
    place = tracked.root / "patches" / "pr" / "known.toml"
    place.write_text(place.read_text().replace("an error", "bad", 1))
    require_error(run("table", "--pages"), "known.toml", "bad")


@pytest.mark.parametrize("depends", [True, False])
def test_what_is_best_sent_first_comes_first(tracked: Mini, run: Run, depends: bool) -> None:
    """beta-fix, which gives wrong numbers, before alpha-fix where it does not need it; gamma-fix is native by then."""
    place = tracked.root / "patches" / "pr" / "known.toml"
    head, mark, tail = place.read_text().partition("[beta-fix]\n")
    place.write_text(head + mark + tail.replace("an error", "wrong numbers", 1))
    beta = tracked.root / "patches" / "v0.29.0" / "0002-beta-fix.patch"
    assert "Depends-On: alpha-fix\n" in beta.read_text()
    if not depends:
        beta.write_text(beta.read_text().replace("Depends-On: alpha-fix\n", ""))
    project = Project(tracked.root)
    pages = tracking.pages(project, status.read(tracked.root / "patches" / status.FILE))
    assert "[PULL_REQUESTS](PULL_REQUESTS.md)" in pages[tracked.root / "patches" / tracking.PAGE]
    page = pages[tracked.root / "patches" / pull_requests.PAGE]
    rows = [line.split(" | ")[1:4] for line in page.splitlines() if line.startswith(("| 1 ", "| 2 ", "| 3 "))]
    expected = [
        ["[0001-alpha-fix](v0.29.0/0001-alpha-fix.patch)", "It ends.", "an error"],
        ["[0002-beta-fix](v0.29.0/0002-beta-fix.patch)", "It ends.", "wrong numbers"],
    ]
    assert rows == (expected if depends else expected[::-1])


def test_pages_are_not_written_of_an_old_table(tracked: Mini, run: Run) -> None:
    (tracked.series_dir / "series").write_text("0001-alpha-fix.patch\n0002-beta-fix.patch\n")
    (tracked.series_dir / "0003-gamma-fix.patch").unlink()
    require_error(run("table", "--pages"), "its series changed")


def test_the_projects_own_links_lead_somewhere() -> None:
    project = Project(ROOT)
    table = status.read(ROOT / "patches" / status.FILE)
    grounds = tracking.grounds_of(project, contracts.fixes(ROOT / "tests" / "contracts"))
    assert all(entry.what and entry.number > 10000 for ground in grounds.values() for entry in ground.entries)
    page = tracking.page(project, table)
    targets = [part.partition(")")[0] for part in page.split("](")[1:]]
    assert targets
    for target in targets:
        if target.startswith("#"):
            assert f"\n## {target[1:]}\n" in page
        elif not target.startswith("https://"):
            assert (ROOT / "patches" / Path(target)).exists(), target
