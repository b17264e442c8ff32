"""Checkouts for nightly runs: a project under git with a remote and a host that gh talks to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_gh
import fake_status
import fake_upstream
import pytest
from k3patches import nightly, status_readme, tracking
from k3patches.project import Project
from miniature import RELEASE, SDIST, Mini, Result, git, sdist_bytes

# The interface of ci/rebase.sh: TARGET [--git URL] --report FOLDER, and its exit codes.
ENGINE = """\
#!{python}
import json, os, sys, time
from pathlib import Path

root = Path(__file__).resolve().parents[1]
arguments = sys.argv[1:]
report = Path(arguments[arguments.index("--report") + 1])
plans = json.loads((root / "engine.json").read_text())
with (root / "engine.log").open("a") as log:
    log.write(json.dumps(arguments) + "\\n")
plan = plans.get("main" if "--git" in arguments else arguments[0], {{"code": 3}})
for name, content in plan.get("files", {{}}).items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
if "report" not in plan or plan["report"]:
    (report / "report.md").write_text(plan.get("report", "# What happened\\n\\nNothing of note.\\n"))
(report / "report.json").write_text("{{}}")
time.sleep(plan.get("sleep", 0))
if plan["code"] < 0:
    os.kill(os.getpid(), -plan["code"])
sys.exit(plan["code"])
"""
IGNORED = ("__pycache__/", "/build/", "/cache/", "/dist/", "/engine.*", "/files/", "/upstream/")


class Hosted:
    """A project in ``root`` as a git checkout; ``remote`` is its repository on the host, of which gh knows ``host``.

    ``environment`` is what a run needs to find this gh.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.remote = folder / "remote.git"
        self.out = root / "build" / "nightly"
        self._gh = folder / "gh.json"
        (root / ".gitignore").write_text("".join(f"{line}\n" for line in IGNORED))
        git(root, "init", "-q", ".")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "The project")
        git(folder, "clone", "-q", "--bare", str(root), str(self.remote))
        git(root, "remote", "add", "origin", str(self.remote))
        self.host = fake_gh.empty(self.remote)
        tools = folder / "bin"
        tools.mkdir()
        (tools / "gh").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(fake_gh.__file__).resolve()}" "$@"\n')
        (tools / "gh").chmod(0o755)
        self.environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "FAKE_GH": str(self._gh)}

    @property
    def host(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._gh.read_text())
        return state

    @host.setter
    def host(self, state: Mapping[str, Any]) -> None:
        self._gh.write_text(json.dumps(state))

    def item(self, number: int, **changes: Any) -> dict[str, Any]:
        """An issue or a pull request on the host, after what a person changed about it."""
        state = self.host
        found: dict[str, Any] = state["items"][number - 1]
        found.update(changes)
        self.host = state
        return found

    def changes(self) -> list[str]:
        """What the nightly run changed on the host since the last call."""
        state = self.host
        log = [f"{method} {path}" for method, path, _ in state["log"]]
        self.host = {**state, "log": []}
        return log

    def branch(self, name: str) -> dict[str, str]:
        """The files that a branch on the host changes against main, with their content."""
        listed = git(self.remote, "diff", "--name-only", f"main...{name}").splitlines()
        return {path: git(self.remote, "show", f"{name}:{path}") for path in listed}

    def head(self, name: str) -> str:
        return git(self.remote, "rev-parse", name).strip()

    def clean(self) -> None:
        """Make the checkout what the publishing job has: the commit and nothing else."""
        git(self.root, "clean", "-q", "-d", "-f")
        git(self.root, "checkout", "-q", "--", ".")


class Checkout(Hosted):
    """The miniature as a checkout, with an engine that does as planned."""

    def __init__(self, mini: Mini, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.mini = mini
        self.upstream = mini.root / "upstream"
        self._patch = patch
        engine = mini.root / "ci" / "rebase.sh"
        engine.write_text(ENGINE.format(python=sys.executable))
        engine.chmod(0o755)
        status = mini.root / "ci" / "status.sh"
        script = Path(fake_status.__file__).resolve()
        status.write_text(f'#!/bin/sh\nPYTHONPATH=ci exec "{sys.executable}" "{script}" "$@"\n')
        status.chmod(0o755)
        fake_upstream.install(mini.root)
        self.measured = fake_status.measure(mini.root, RELEASE, {})
        (mini.root / "patches" / "status.json").write_text(self.measured.to_json())
        readme = f"# A project\n\n{status_readme.BEGIN}\n{status_readme.END}\n\nThe rest.\n"
        (mini.root / "README.md").write_text(readme)
        for path, text in tracking.pages(Project(mini.root), self.measured).items():
            path.write_text(text)
        super().__init__(mini.root, folder)
        for name, value in self.environment.items():
            patch.setenv(name, value)
        self.plan({})

    def plan(self, plans: Mapping[str, Any]) -> None:
        """What the engine does for each target; for all others there is nothing to do."""
        (self.root / "engine.json").write_text(json.dumps(plans))

    def asked(self) -> list[list[str]]:
        """What the engine was run with, without the report's folder, which comes last."""
        log = self.root / "engine.log"
        return [json.loads(line)[:-2] for line in log.read_text().splitlines()] if log.exists() else []

    def release(self, *versions: str) -> None:
        """Put releases on the package index."""
        for version in versions:
            (self.mini.files / SDIST.replace("0.27.1", version)).write_bytes(sdist_bytes())

    def run(self, *args: str | Path) -> Result:
        """Run ci/nightly.sh's commands in this process."""
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with self._patch.context() as inner, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            inner.setattr(sys, "argv", ["nightly.sh", *map(str, args)])
            inner.setattr("k3patches.project.Project.find", lambda: Project(self.root))
            try:
                nightly.main()
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 1
        return Result(code, out.getvalue(), err.getvalue())

    def night(self, *targets: str) -> Result:
        """One night: rebase in the checkout, and publish from a clean one, as in two jobs."""
        result = self.run("rebase", "--git", self.upstream, *targets)
        self.clean()
        if result.code == 0:
            result = self.run("publish")
        return result
