"""The workflows: sound, pinned, with no more rights than their jobs need, and of nothing but the project's scripts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from miniature import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.y*ml"))
TOOLS = Path(sys.executable).parent
READ = {"contents": "read"}
# All that each job may do with the default token, and why it must.
RIGHTS: dict[tuple[str, str], dict[str, str]] = {
    ("test", "test"): READ,
    ("nightly", "rebase"): READ,
    ("nightly", "publish"): {
        "actions": "write",  # starts the tests on the branches that it pushes
        "contents": "write",  # pushes them
        "issues": "write",
        "pull-requests": "write",
    },
    ("release", "build"): READ,
    ("release", "publish"): {
        "attestations": "write",
        "contents": "write",  # the tag and the release
        "id-token": "write",  # signs the attestation
    },
}
# What a job that can write may run: nothing of upstream's.
WRITES = {"nightly": ["ci/nightly.sh publish"], "release": ["ci/release.sh publish --yes"]}
USES = re.compile(r"^\s*(?:- )?uses: ([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")


def findings(path: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with a workflow by the rules of this project, which no linter knows."""
    text = path.read_text()
    workflow: dict[Any, Any] = yaml.safe_load(text)
    triggers = set(workflow[True])  # YAML 1.1 reads the key "on" as a truth value
    wrong = [f"trigger {t}" for t in triggers - {"push", "pull_request", "schedule", "workflow_dispatch"}]
    wrong += [f"not pinned: {line.strip()}" for line in text.splitlines() if "uses:" in line and not USES.match(line)]
    wrong += [f"secret {secret}" for secret in re.findall(r"secrets[.\[]\S*", text)]
    if workflow.get("permissions") != {}:
        wrong.append("the workflow's own permissions are not none")
    if "group" not in workflow.get("concurrency", {}):
        wrong.append("no concurrency group")
    for name, job in workflow["jobs"].items():
        if job.get("permissions") != RIGHTS.get((path.stem, name)):
            wrong.append(f"permissions of {name}: {job.get('permissions')}")
        if not job.get("timeout-minutes"):
            wrong.append(f"no time-out of {name}")
        for step in job["steps"]:
            wrong += [f"{name}: {what}" for what in _step(step, root)]
    return wrong


def _step(step: dict[str, Any], root: Path) -> list[str]:
    if step.get("uses", "").startswith("actions/checkout@"):
        kept = step.get("with", {}).get("persist-credentials", True)
        return ["the checkout keeps the token"] if kept is not False else []
    if "run" not in step:
        return []
    words = shlex.split(step["run"], comments=True)
    script = root / words[0]
    wrong = []
    if not words[0].startswith("ci/") or not script.is_file() or not os.access(script, os.X_OK):
        wrong.append(f"{words[0]} is no script of ci/")
    if set(step["run"]).intersection("\n;|&$`<>"):
        wrong.append(f"more than a script's call: {step['run']}")
    return wrong


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    """actionlint, with shellcheck for what the steps run."""
    command = [TOOLS / "actionlint", "-no-color", "-shellcheck", TOOLS / "shellcheck", *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def audit(*files: Path) -> subprocess.CompletedProcess[str]:
    """zizmor, which knows the ways to break into a workflow; without asking the network."""
    command = [TOOLS / "zizmor", "--offline", "--no-progress", "--color=never", *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_linter_has_nothing_to_say() -> None:
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_audit_has_nothing_to_say() -> None:
    done = audit(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_the_projects_rules_hold(path: Path) -> None:
    assert findings(path) == []


def test_there_are_no_other_workflows_and_no_actions_of_our_own() -> None:
    there = {p.relative_to(ROOT / ".github").as_posix() for p in (ROOT / ".github").rglob("*") if p.is_file()}
    assert {name for name in there if not name.endswith(".md")} == {f"workflows/{name}.yml" for name, _ in RIGHTS}
    assert {(p.stem, job) for p in WORKFLOWS for job in yaml.safe_load(p.read_text())["jobs"]} == set(RIGHTS)


def test_an_action_is_pinned_to_one_commit_everywhere() -> None:
    pins = {m.groups() for p in WORKFLOWS for line in p.read_text().splitlines() if (m := USES.match(line))}
    assert len({name for name, _, _ in pins}) == len(pins)


def test_only_a_job_that_runs_nothing_of_upstreams_can_write() -> None:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            if "write" in RIGHTS[path.stem, name].values():
                assert [step["run"] for step in job["steps"] if "run" in step] == WRITES[path.stem]


def test_the_pushed_branches_are_tested_by_a_workflow_that_can_be_started() -> None:
    from k3patches.nightly_publish import WORKFLOW

    assert "workflow_dispatch" in yaml.safe_load((FOLDER / WORKFLOW).read_text())[True]


def test_the_test_workflow_runs_the_readmes_test_command() -> None:
    job = yaml.safe_load((FOLDER / "test.yml").read_text())["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["ci/test.sh"]
    assert "\nci/test.sh " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new", "word"),
    [
        ("test", "@9c091bb21b7c1c1d1991bb908d89e4e9dddfe3e0 # v7.0.0", "@v7", "not pinned"),
        ("test", " # v7.0.0", "", "not pinned"),
        ("test", "      contents: read", "      contents: write", "permissions of test"),
        ("test", "    permissions:\n      contents: read\n", "", "permissions of test"),
        ("test", "permissions: {}\n", "", "the workflow's own permissions"),
        ("test", "ci/test.sh", "ci/tests.sh", "no script"),
        ("test", "ci/test.sh", "ci/env.sh", "no script"),
        ("test", "ci/test.sh", "./build.sh", "no script"),
        ("test", "ci/test.sh", "ci/test.sh; true", "more than"),
        ("test", "ci/test.sh", "ci/test.sh ${{ github.head_ref }}", "more than"),
        ("test", "  pull_request:", "  pull_request_target:", "trigger"),
        ("test", "          persist-credentials: false\n", "          fetch-depth: 1\n", "keeps the token"),
        ("nightly", "github.token", "secrets.TOKEN", "secret"),
        ("nightly", "    timeout-minutes: 15\n", "", "time-out of publish"),
        ("nightly", "  group: nightly\n", "", "concurrency"),
        ("release", "      contents: read", "      contents: write", "permissions of build"),
        ("release", "      id-token: write", "      packages: write", "permissions of publish"),
    ],
)
def test_the_rules_find_what_breaks_them(tmp_path: Path, name: str, old: str, new: str, word: str) -> None:
    path = _damaged(tmp_path, name, old, new)
    assert any(word in finding for finding in findings(path)), findings(path)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("    runs-on: ubuntu-24.04\n", "", "runs-on"),
        ("    timeout-minutes: 90", "    timeout: 90", "unexpected key"),
        ("      contents: read", "      content: read", "permission"),
        ("- run: ci/test.sh", "- run: ci/test.sh $HOME", "SC2086"),
        ("vars.PIP", "var.PIP", "undefined variable"),
    ],
)
def test_the_linter_finds_what_is_wrong(tmp_path: Path, old: str, new: str, word: str) -> None:
    done = lint(_damaged(tmp_path, "test", old, new))
    assert done.returncode == 1
    assert word in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("          persist-credentials: false\n", "          fetch-depth: 1\n", "artipacked"),
        ("- run: ci/test.sh", "- run: ci/test.sh ${{ github.head_ref }}", "template-injection"),
        ("  pull_request:", "  pull_request_target:", "dangerous-triggers"),
    ],
)
def test_the_audit_finds_what_is_wrong(tmp_path: Path, old: str, new: str, word: str) -> None:
    done = audit(_damaged(tmp_path, "test", old, new))
    assert done.returncode > 0
    assert word in done.stdout


def _damaged(folder: Path, name: str, old: str, new: str) -> Path:
    text = (FOLDER / f"{name}.yml").read_text()
    assert old in text
    path = folder / ".github" / "workflows" / f"{name}.yml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(old, new, 1))
    return path
