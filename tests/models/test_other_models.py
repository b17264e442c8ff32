"""No model is worse off with the patched tree, on CPU: small models of any kind, loaded by it and by the release.

What the release loads loads, and where it is right the patched tree's parameters are the same, or its layers are as
right; where it is wrong they are right, or at least no further off. Weights come as users have them: loaded, dummy
ones first, reloaded. `python tests/models/verdict.py PRISTINE PATCHED` lists every difference of two reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "contracts")]  # of which nothing imports vLLM here
import verdict  # noqa: E402
import zoo  # noqa: E402

Reports = dict[str, dict[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--bases")
        every = sorted(folder.name.removeprefix("v") for folder in (ROOT / "patches").glob("v*"))
        metafunc.parametrize("release", every if chosen == "all" else chosen.split(","), scope="session")


@pytest.fixture(scope="session")
def compare(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Reports, Reports]]:
    """The reports of a release and of its patched tree; a process each, once."""
    seen: dict[str, tuple[Reports, Reports]] = {}
    option = request.config.getoption

    def trees(release: str, folder: Path) -> tuple[Path, Path]:
        patched = (ROOT / option("--patched").format(release)).resolve()
        if not (patched / "vllm").is_dir():
            pytest.skip(f"absent: ./build.sh apply --base {release} has not made {patched}")
        if option("--pristine"):
            return (ROOT / option("--pristine").format(release)).resolve(), patched
        archive = subprocess.run(
            ["git", "archive", "pristine", "vllm"], cwd=patched, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
        return folder, patched

    def run(release: str) -> tuple[Reports, Reports]:
        if release not in seen:
            folder = tmp_path_factory.mktemp("pristine")
            command = [sys.executable, str(HERE / "worker.py")]
            if option("--thorough"):
                command.append("--thorough")
            started = []
            for number, tree in enumerate(trees(release, folder)):
                out = tmp_path_factory.mktemp("reports") / f"{number}.json"
                # A worker says much, and nobody reads it until it fails.
                log = out.with_suffix(".log")
                with log.open("w") as file:
                    process = subprocess.Popen([*command, str(tree), str(out)], stdout=file, stderr=file)
                started.append((process, out, log))
            for process, _, log in started:
                assert process.wait(3600) == 0, log.read_text()[-2000:]
            before, after = (json.loads(out.read_text()) for _, out, _ in started)
            seen[release] = before, after
        return seen[release]

    return run


@pytest.mark.parametrize("storage", zoo.STORAGES)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_no_model_is_worse_off(
    compare: Callable[[str], tuple[Reports, Reports]], release: str, model: str, storage: str
) -> None:
    before, after = compare(release)
    findings = [
        finding
        for case in before
        if case.startswith(f"{model}/{storage}/")
        for finding in verdict.judge(case, before[case], after[case])
    ]
    broken = [str(finding) for finding in findings if finding.kind in verdict.BROKEN]
    assert not broken, "\n".join(broken)


def test_the_release_serves_most_of_them(compare: Callable[[str], tuple[Reports, Reports]], release: str) -> None:
    # Or there would be nothing to compare with.
    before, _ = compare(release)
    loaded = {tuple(case.split("/")[:2]) for case, seen in before.items() if _loads(seen)}
    assert len(loaded) >= 0.7 * len(zoo.MODELS) * len(zoo.STORAGES)
    assert {model for model, _ in loaded} == set(zoo.MODELS)


def _loads(seen: dict[str, Any]) -> bool:
    return all("refused" not in step for step in seen["steps"].values())
