"""Publishing a revision: what has to be in order, what is built, and what git and gh are told."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import fake_status
import fake_upstream
import pytest
from k3patches import changelog, contracts, series, ship, tracking
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.status_readme import BEGIN, END
from k3patches.upstream import results
from miniature import (
    BUILT,
    COMMITS,
    HASHED,
    RELEASE,
    ROOT,
    VERSION,
    Mini,
    Result,
    git,
    known_text,
    require_error,
    require_ok,
    sha256,
)
from nightly_checkout import Hosted

TAG = f"v{VERSION}"
FIXES = [entry.fix for entry in COMMITS]
CHANGELOG = f"""# Changelog

## [Unreleased]

## [k3.7] - 2026-12-01

### Fixed

- `alpha-fix`: numbers on {RELEASE}.

## [k3.6] - 2026-11-01

- `beta-fix`, gamma-fix.
"""
FILES = [*BUILT.values(), *HASHED.values(), *(f"{name}.cdx.json" for name in BUILT.values()), "SHA256SUMS"]


class Checkout(Hosted):
    """The miniature as a checkout that can be published, and what the host knows."""

    def __init__(self, mini: Mini, folder: Path, patch: pytest.MonkeyPatch) -> None:
        table = fake_status.measure(mini.root, RELEASE, {})
        (mini.root / "patches" / "status.json").write_text(table.to_json())
        (mini.root / "patches" / results.FILE).write_text(fake_upstream.text(mini.root, RELEASE))
        (mini.root / "patches" / "CHANGELOG.md").write_text(CHANGELOG)
        (mini.root / "README.md").write_text(f"{BEGIN}\n{END}\n")
        for path, text in tracking.pages(Project(mini.root), table).items():
            path.write_text(text)
        super().__init__(mini.root, folder)
        self.made = mini.root / "build" / "release" / TAG
        self._patch = patch
        for name, value in self.environment.items():
            patch.setenv(name, value)

    def run(self, *args: str) -> Result:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with self._patch.context() as inner, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            inner.setattr("sys.argv", ["ci/release.sh", *args])
            inner.setattr("k3patches.project.Project.find", lambda: Project(self.root))
            try:
                ship.main()
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 1
        return Result(code, out.getvalue(), err.getvalue())

    def commit(self, name: str, change: Callable[[str], str]) -> None:
        path = self.root / name
        path.write_text(change(path.read_text()))
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "--allow-empty", "-m", "A change")


@pytest.fixture
def checkout(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(mini, tmp_path, monkeypatch)


@pytest.fixture
def ready(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """All built."""
    # Its findings are not what these tests are about.
    monkeypatch.setattr("k3patches.lint.lint", lambda *given: True)
    require_ok(checkout.run("build"))
    return checkout


def test_check_finds_nothing_against_a_checkout_in_order(checkout: Checkout) -> None:
    told = require_ok(checkout.run("check"))
    assert f"{TAG}: commit, status table and changelog are as they should be" in told.err
    assert f"series of vLLM {RELEASE}, 3 patches" in told.err
    assert not checkout.made.exists()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("patches/CHANGELOG.md", lambda t: t.replace("k3.7", "k3.5"), ("no dated entry for k3.7",)),
        ("patches/CHANGELOG.md", lambda t: t.replace(" - 2026-12-01", ""), ("no dated entry for k3.7",)),
        ("patches/CHANGELOG.md", lambda t: t.replace("gamma-fix", ""), ("does not name gamma-fix",)),
        ("patches/CHANGELOG.md", lambda t: t.replace(RELEASE, "0.27"), (f"does not name {RELEASE}",)),
        (
            "patches/CHANGELOG.md",
            lambda t: t.replace("## [Unreleased]\n", "## [Unreleased]\n\n- more\n"),
            ("'- more'",),
        ),
        ("VERSION", lambda t: t.replace("k3.7", "k3.8"), ("the revision was 7 and is 8",)),
        ("patches/TRACKING.md", lambda t: t + "more\n", ("TRACKING.md", "--pages")),
        ("patches/upstream-tests.json", lambda t: t.replace(RELEASE, "0.26.0"), (f"{RELEASE} was not run",)),
        (
            "patches/upstream-tests.json",
            lambda t: t.replace('"turned": {}', '"turned": {"test_a.py::b": "failed: no"}'),
            ("test_a.py::b", "mend that first"),
        ),
        ("README.md", lambda t: t.replace("patched", "native"), ("README.md", "--pages")),
    ],
)
def test_check_finds_what_is_not_in_order(
    checkout: Checkout, name: str, change: Callable[[str], str], words: tuple[str, ...]
) -> None:
    checkout.commit(name, change)
    for command in (["check"], ["build"], ["publish"], ["publish", "--yes"]):
        require_error(checkout.run(*command), *words)
    assert not checkout.made.exists()
    assert git(checkout.remote, "tag") == ""


@pytest.mark.parametrize("name", ["README.md", "notes.txt"])
def test_a_checkout_with_changes_is_not_published(checkout: Checkout, name: str) -> None:
    with (checkout.root / name).open("a") as f:
        f.write("more\n")
    require_error(checkout.run("check"), "has changes", name)


def test_a_broken_cell_is_not_published(checkout: Checkout) -> None:
    table = fake_status.measure(checkout.root, RELEASE, {"beta-fix": {"patched": {"failed": 1}}})
    (checkout.root / "patches" / "status.json").write_text(table.to_json())
    for path, text in tracking.pages(Project(checkout.root), table).items():
        path.write_text(text)
    checkout.commit("VERSION", str)
    require_error(checkout.run("check"), RELEASE, "beta-fix is broken")


def test_findings_of_the_lint_are_told(checkout: Checkout) -> None:
    (checkout.root / "tests" / "contracts" / "test_delta_fix.py").write_text("# no patch names it\n")
    path = checkout.root / "patches" / f"v{RELEASE}" / "0003-gamma-fix.patch"
    path.write_text(path.read_text().replace("Signed-off-by", "Seen-by"))
    table = fake_status.measure(checkout.root, RELEASE, {})
    (checkout.root / "patches" / "status.json").write_text(table.to_json())
    (checkout.root / "patches" / results.FILE).write_text(fake_upstream.text(checkout.root, RELEASE))
    known = checkout.root / "patches" / "pr" / "known.toml"
    known.write_text(known.read_text() + known_text(["delta-fix"]))
    for page, text in tracking.pages(Project(checkout.root), table).items():
        page.write_text(text)
    checkout.commit("VERSION", str)
    require_error(checkout.run("build"), "findings listed above")
    assert not checkout.made.exists()


def test_build_makes_all_that_is_published(ready: Checkout) -> None:
    assert sorted(p.name for p in ready.made.iterdir()) == sorted(FILES)
    sums = dict(line.split("  ")[::-1] for line in (ready.made / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: sha256(ready.made / name) for name in FILES[:-1]}
    bill = json.loads((ready.made / f"{BUILT['aarch64']}.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == VERSION


def test_build_keeps_what_is_there_and_mends_what_is_not(ready: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: (ready.made / name).stat().st_mtime_ns for name in BUILT.values()}
    (ready.made / BUILT["aarch64"]).write_bytes(b"half")
    require_ok(ready.run("build"))
    assert (ready.made / BUILT["x86_64"]).stat().st_mtime_ns == before[BUILT["x86_64"]]
    require_ok(ready.run("publish"))
    # Another commit's wheels have other bytes.
    ready.commit("VERSION", str)
    require_error(ready.run("publish"), "was built by commit", "ci/release.sh build")
    require_ok(ready.run("build"))
    require_ok(ready.run("publish"))


def test_without_yes_nothing_happens(ready: Checkout) -> None:
    told = require_ok(ready.run("publish")).out
    for name in FILES:
        assert f"would attach {name} (" in told
    assert f"as {TAG} and push it to origin" in told
    assert (git(ready.root, "tag"), git(ready.remote, "tag"), ready.host["releases"]) == ("", "", {})


def test_publish_tags_and_attaches(ready: Checkout) -> None:
    require_ok(ready.run("publish", "--yes"))
    assert git(ready.remote, "cat-file", "-t", TAG).strip() == "tag"
    assert ready.head(f"{TAG}^{{commit}}") == git(ready.root, "rev-parse", "HEAD").strip()
    message = git(ready.remote, "tag", "-l", "--format=%(contents)", TAG)
    assert message.startswith(f"Series k3.7 for vLLM {RELEASE}\n\n### Fixed\n\n- `alpha-fix`: numbers")
    release = ready.host["releases"][TAG]
    assert (release["title"], release["draft"]) == (VERSION, False)
    assert release["notes"].startswith("### Fixed")
    assert release["assets"] == {name: sha256(ready.made / name) for name in FILES}
    # Again: it is published, and stays as it is.
    told = require_ok(ready.run("publish", "--yes")).out
    assert "is published already" in told
    assert ready.host["releases"][TAG] == release


def test_a_broken_upload_is_completed(ready: Checkout) -> None:
    ready.host = {**ready.host, "refuse": {"upload": "HTTP 500"}}
    require_error(ready.run("publish", "--yes"), "gh release upload failed", "HTTP 500", "run it again")
    assert ready.host["releases"][TAG]["draft"] is True
    require_ok(ready.run("publish", "--yes"))
    release = ready.host["releases"][TAG]
    assert (release["draft"], sorted(release["assets"])) == (False, sorted(FILES))


def test_a_tag_that_a_person_pushed_is_taken(ready: Checkout) -> None:
    git(ready.root, "tag", "-a", "-m", "mine", TAG)
    git(ready.root, "push", "-q", "origin", TAG)
    require_ok(ready.run("publish", "--yes"))
    assert git(ready.remote, "tag", "-l", "--format=%(contents:subject)", TAG).strip() == "mine"
    assert ready.host["releases"][TAG]["draft"] is False


def test_a_tag_of_another_commit_is_not_moved(ready: Checkout) -> None:
    git(ready.root, "commit", "-q", "--allow-empty", "-m", "another")
    git(ready.root, "tag", "-a", "-m", "mine", TAG)
    git(ready.root, "push", "-q", "origin", TAG)
    git(ready.root, "checkout", "-q", "HEAD^")
    require_error(ready.run("publish", "--yes"), f"{TAG} is commit", "raise the revision")
    # Also where only the remote has it.
    git(ready.root, "tag", "-d", TAG)
    require_error(ready.run("publish", "--yes"), "git push failed")
    assert ready.host["releases"] == {}


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_or_changed_is_not_published(ready: Checkout, name: str) -> None:
    content = (ready.made / name).read_bytes()
    (ready.made / name).unlink()
    require_error(ready.run("publish", "--yes"), "lacks", name)
    (ready.made / name).write_bytes(content[:-3] + b"xyz" if name != "SHA256SUMS" else content[70:])
    require_error(ready.run("publish", "--yes"), "ci/release.sh build")
    assert git(ready.remote, "tag") == ""


def test_without_gh(ready: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin" / "gh").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    require_error(ready.run("publish", "--yes"), "gh is not installed")


def test_an_unknown_base(checkout: Checkout) -> None:
    require_error(checkout.run("check", "--base", "0.1.0"), "no series for vLLM 0.1.0")


def test_the_projects_own_changelog_is_fit_for_a_release() -> None:
    project = Project(ROOT)
    named = {f for r in project.releases for p in series.load(project.series_dir(r)) for f in p.contracts}
    assert named <= set(contracts.fixes(ROOT / "tests" / "contracts"))
    path = ROOT / "patches" / "CHANGELOG.md"
    entry = changelog.entries(path)[1]
    assert entry.name == f"k3.{project.revision}"
    with contextlib.suppress(UserError):
        # Between releases, the next one's lines wait under Unreleased.
        changelog.released(path, project.revision, project.releases, named)
    told = path.read_text()
    assert [what for what in (*project.releases, *named) if what not in told] == []
