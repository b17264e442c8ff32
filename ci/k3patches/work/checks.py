"""What must hold of an edited series before it is written: the lint, the contracts, and the patches' own tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import click

from k3patches import contracts, lint, patchtests
from k3patches.base import Base
from k3patches.git import git
from k3patches.rebase.bench import Bench
from k3patches.rebase.gitwork import Commit
from k3patches.series import Patch
from k3patches.source import Source
from k3patches.work import templates


def unwritten(patches: Sequence[Patch], folder: Path) -> list[str]:
    """Messages, and contracts in ``folder``, that still are the template's."""
    found = [f"the message of {p.name} is not written (git commit --amend)" for p in patches if templates.left(p.body)]
    for fix in dict.fromkeys(fix for p in patches for fix in p.contracts):
        path = folder / contracts.contract_file(fix)
        if path.is_file() and path.read_text(encoding="utf-8") == templates.CONTRACT_FILE.format(fix=fix):
            found.append(f"the contract {path.name} is not written")
    return found


def linted(base: Base, source: Source, patches: Sequence[Patch], folder: Path, scratch: Path) -> list[str]:
    """The lint prints what it finds; the finding here is that it did.  ``folder`` is that of the contracts."""
    click.echo(f"lint of {len(patches)} patches", err=True)
    return [] if lint.lint(base, source, patches, folder, scratch) else ["the lint has the findings above"]


class Runs:
    """Runs on ``tree``, a work tree that has ``commits``, those of ``patches``; ``log`` gets what pytest prints."""

    def __init__(self, tree: Path, commits: Sequence[Commit], patches: Sequence[Patch], bench: Bench, log: Path):
        self.tree, self.commits, self.patches, self.bench, self.log = tree, commits, patches, bench, log

    def with_the_series(self, fixes: Collection[str], gone: Collection[str]) -> list[str]:
        """Contracts that do not hold with the whole series; ``gone`` are fixes that have no patch in it any more."""
        wanted = sorted({*fixes, *gone})
        outcomes = self._run(self.commits[-1].id if self.commits else "HEAD", wanted) if wanted else {}
        found = []
        for fix, outcome in outcomes.items():
            click.echo(f"  {fix}: {outcome}", err=True)
            if outcome.holds or (fix in gone and outcome.is_absent):
                continue
            for line in contracts.failures(self.log, fix):
                click.echo(f"    {line}", err=True)
            why = "and no patch is for it any more" if fix in gone else "with the series"
            found.append(f"{fix} does not hold, {why} ({outcome})")
        return found

    def without_it(self, patch: Patch) -> list[str]:
        """Contracts of ``patch`` that hold on the series below it, where they must not."""
        commit = self.commits[self.patches.index(patch)]
        outcomes = self._run(f"{commit.id}^", patch.contracts, in_short=True)
        for fix, outcome in outcomes.items():
            click.echo(f"  {fix} without {patch.name}: {outcome}", err=True)
        return [f"{fix} holds without {patch.name}" for fix, o in outcomes.items() if o.holds or o.is_absent]

    def own_tests(self, patches: Sequence[Patch]) -> list[str]:
        """The tests that ``patches`` carry, as far as they need no accelerator."""
        git("checkout", "-q", "--detach", self.commits[-1].id, cwd=self.tree)
        with self.log.open("w") as output:
            passed = patchtests.run(patches, self.tree, self.bench.python, jobs=str(contracts.PARALLEL), output=output)
        lines = self.log.read_text(errors="replace").splitlines()
        click.echo(f"  own tests of {', '.join(p.name for p in patches)}: {lines[-1] if lines else 'none'}", err=True)
        if passed:
            return []
        for line in [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:5]:
            click.echo(f"    {line}", err=True)
        return ["tests that the patches carry fail"]

    def _run(self, commit: str, fixes: Sequence[str], in_short: bool = False) -> dict[str, contracts.Outcome]:
        git("checkout", "-q", "--detach", commit, cwd=self.tree)
        return self.bench.run(self.tree, fixes, self.log, in_short=in_short)
