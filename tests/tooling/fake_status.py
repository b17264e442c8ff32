"""A stand-in for ci/status.sh: the table as the project itself writes it, with results that are planned.

What is planned lies in engine.json of the checkout: for a release's ``status`` how fixes do that do not as they
should, or ``None``, where it fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3patches import base as bases
from k3patches import contracts, series, status
from k3patches.contracts import Outcome, State, Verdict
from k3patches.project import Project
from k3patches.status_cli import table_command

HOLDS, FAILS = Outcome(passed=1), Outcome(failed=1)


def measure(root: Path, release: str, planned: Mapping[str, Any]) -> status.Table:
    """The table of one release, in which each fix that has a patch is patched, and all else native."""
    project, folder = Project(root), root / "tests" / "contracts"
    where = project.series_dir(release)
    patches = series.load(where)
    by_fix = status.by_fix(patches)
    verdicts = []
    for fix in contracts.fixes(folder):
        sides = {"pristine": FAILS if fix in by_fix else HOLDS, "patched": HOLDS}
        sides |= {side: Outcome(**counts) for side, counts in planned.get(fix, {}).items()}
        verdicts.append(Verdict(fix, **sides))
    inputs = status.Inputs.of(bases.load(where), patches, folder)
    ran_on = {"python": "3.11.9", "torch": "2.13.0+cpu"}
    return status.Table(project.revision, ran_on, {release: status.Column(inputs, verdicts, by_fix)})


def main(root: Path, arguments: Sequence[str]) -> int:
    # The real command's options.
    given = table_command.make_context("table", list(arguments)).params
    [release] = given["chosen"]
    assert given["write_broken"]
    planned = json.loads((root / "engine.json").read_text()).get(release, {}).get("status", {})
    if planned is None:
        print("Error: a made-up reason", file=sys.stderr)
        return 1
    table = measure(root, release, planned)
    given["json_file"].write_text(table.to_json())
    return any(v.state is State.BROKEN for v in table.columns[release].verdicts)


if __name__ == "__main__":
    sys.exit(main(Path.cwd(), sys.argv[1:]))
