"""Make a patch a branch: carry it, strip it, measure it, describe it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from k3patches import messages
from k3patches.errors import UserError
from k3patches.git import git
from k3patches.messages import CONTRACT
from k3patches.pr import carrier as carriers
from k3patches.pr import description, known, place, record, runs, stack, strip
from k3patches.pr.carrier import Stopped
from k3patches.pr.desk import Desk
from k3patches.pr.record import Exported, State
from k3patches.pr.runs import Results
from k3patches.rebase import gitwork, kept
from k3patches.rebase.errors import NeedsPerson
from k3patches.rebase.gitwork import Commit
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG


@dataclass(frozen=True)
class Done:
    """An export that came to its end, in ``folder``, on ``below`` patches that it depends on.

    ``unknown`` are headings of upstream's template that nobody filled in; ``unchanged`` says that all of it was there
    already, byte for byte.
    """

    record: Exported
    results: Results
    folder: Path
    below: int
    unknown: list[str]
    unchanged: bool


class Export:
    """The export of one patch."""

    def __init__(self, desk: Desk, patch: Patch) -> None:
        self.desk, self.patch = desk, patch
        self.folder = desk.work(patch, desk.upstream)
        self.tree = self.folder / "tree"
        self.branch = desk.options.branch or place.branch_of(patch.contracts[0])

    def abort(self) -> None:
        if not self.folder.exists():
            raise UserError(f"no export of {self.patch.name} was kept: there is nothing to abort")
        shutil.rmtree(self.folder)

    def run(self, go_on: bool = False) -> Done:
        """Start, or ``go_on`` in the kept tree, to the end."""
        left = record.state(self.folder)
        if go_on:
            if not left:
                raise UserError(f"no export of {self.patch.name} waits for anybody: start one without --continue")
            self.state = left
            self.branch = left.branch
            self._take_over()
        elif left and left.waiting:
            raise NeedsPerson(
                f"{self._shown} holds an export that somebody was asked to edit: go on with --continue, or throw it "
                f"away with --abort"
            )
        else:
            self._set_up()
        commits = self._carry()
        tops = strip.strip(self.tree, self.desk.upstream.commit, commits)
        self._require_free(tops[-1])
        parent = tops[-2] if len(tops) > 1 else self.desk.upstream.commit
        after = self._checkout("after", tops[-1])
        results = self._measure(self._checkout("before", parent), after, parent)
        self._note_resolutions(commits)
        return self._finish(after, parent, tops[-1], results)

    def below(self) -> list[Patch]:
        """What the branch must hold as well: the patches that this one depends on, as far as upstream lacks them."""
        also = [stack.find(self.desk.patches, name) for name in self.desk.options.also]
        return stack.below(self.desk.patches, self.patch, also, self._lacking)

    # The steps.

    def _set_up(self) -> None:
        own = self.patch.contracts
        if self.desk.options.onto and not any(map(self._lacking, own)):
            raise UserError(
                f"{self.desk.upstream.label} has {', '.join(own)} by itself, as the contract shows without "
                f"{self.patch.name}: there is nothing to export"
            )
        below = self.below()
        if below and not self.desk.options.stacked:
            names = ", ".join(p.name.removesuffix(".patch") for p in below)
            raise UserError(
                f"{self.patch.name} depends on what upstream does not have either, {names}: --stack puts it on top of "
                f"{'them' if len(below) > 1 else 'that'}"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.desk.upstream.tree(self.tree)
        gitdir, ref = self.desk.gitdir, (self.desk.options.onto or ("", None))[1]
        self.state = State(
            self.patch.name,
            [p.name for p in below],
            self.desk.upstream.commit,
            self.branch,
            self.desk.upstream.commit,
            str(gitdir) if gitdir else None,
            ref,
        )
        self.state.save(self.folder)

    def _lacking(self, fix: str) -> bool:
        """Whether upstream lacks ``fix``; the base's own release lacks all that its series is for.

        So does one where nothing can be run: a patch too many is seen, one that is missing is not.
        """
        if not self.desk.options.onto or self.desk.without:
            return True
        folder = self.desk.root / "work" / f"{self.desk.upstream.name}.pristine"
        shutil.rmtree(folder, ignore_errors=True)
        tree = self.desk.upstream.tree(folder)
        try:
            return not self.desk.bench.run(tree, [fix], folder / ".git" / "contracts.log")[fix].holds
        finally:
            shutil.rmtree(folder)

    def _take_over(self) -> None:
        """Take the tree back from the person: their edit becomes the commit of the patch that waited."""
        if self.state.waiting:
            kept.take_back(self.tree, self._shown)
        else:
            # Killed on the way: what is in no commit is the engine's own.
            git("reset", "-q", "--hard", self.state.head, cwd=self.tree)
            git("clean", "-q", "-f", "-d", cwd=self.tree)
        self.state.waiting, self.state.stopped, self.state.head = False, None, gitwork.head(self.tree)
        self.state.save(self.folder)

    def _members(self) -> list[Patch]:
        return [p for p in self.desk.patches if p.name in (*self.state.stack, self.patch.name)]

    def _carry(self) -> list[str]:
        """Carry what is not there yet, and return the commits, one a patch."""
        carrier = self.desk.carrier(self.tree, self.desk.upstream.name)
        for patch in self._members():
            if patch.contracts[0] in self._there():
                continue
            if patch.name in self.state.asked:
                raise NeedsPerson(
                    f"{patch.name} has no commit in {self._shown} (one with the trailer {CONTRACT}: "
                    f"{patch.contracts[0]}): make one and run --continue, or throw all away with --abort"
                )
            try:
                carrier.bring(patch)
            except Stopped as e:
                for conflict in e.conflicts:
                    self.desk.progress.say(f"    {conflict.path}: {conflict.how}, {len(conflict.hunks)} hunks")
                self._stop(patch.name, f"{patch.name} needs a person on {self.desk.upstream.label}, {e.why}")
            self.state.head = gitwork.head(self.tree)
            self.state.save(self.folder)
        commits = gitwork.above(self.tree, PRISTINE_TAG)
        wanted = [p.contracts[0] for p in self._members()]
        if [(messages.fixes(c.message) or [""])[0] for c in commits] != wanted:
            self._stop(None, f"{self._shown} must hold a commit for each of {', '.join(wanted)}, in this order")
        return self._as_in_the_series(commits)

    def _as_in_the_series(self, commits: Sequence[Commit]) -> list[str]:
        """Give what people committed the messages and the authors of the series, so that no date of today is in it."""
        parent, made = gitwork.pristine(self.tree), []
        for patch, commit in zip(self._members(), commits, strict=True):
            source = self.desk.sources[patch.name]
            parent = gitwork.write_commit(self.tree, commit.tree, parent, source.message, source.author)
            made.append(parent)
        git("reset", "-q", "--soft", parent, cwd=self.tree)
        return made

    def _there(self) -> set[str]:
        return {f for c in gitwork.above(self.tree, PRISTINE_TAG) for f in messages.fixes(c.message)}

    def _checkout(self, name: str, commit: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        self.desk.upstream.tree(folder)
        # Not borrowed: the result is to outlive the work folder, and the reference keeps the commit when it is amended.
        git("fetch", "-q", "--no-tags", "--no-auto-gc", self.tree, f"+{strip.REF}:{strip.REF}", cwd=folder)
        git("checkout", "-q", "--detach", commit, cwd=folder)
        return folder

    def _measure(self, before: Path, after: Path, parent: str) -> Results:
        with self.desk.progress.step(f"{self.patch.name}: tests and contracts without it and with it"):
            why = self.desk.without
            results = runs.measure(
                self.patch, before, after, self.desk.bench, self.folder / "logs", self.desk.ran_on, why
            )
        if results.wrong:
            what, logs = "; ".join(results.wrong), self.desk.shown(self.folder / "logs")
            told = f"on {self.desk.upstream.label}, {self.patch.name} does not do its job: {what} (see {logs})"
            if not all(after.holds for _, after in results.contracts.values()):
                told += "; where it needs another patch that it does not declare, --abort and add --with NNNN"
            self._stop(None, told)
        return results

    def _note_resolutions(self, commits: Sequence[str]) -> None:
        """Where a person was asked, keep what they did, so that the same export needs nobody the next time."""
        if not self.state.asked:
            return
        folder = self.desk.recorded(self.desk.upstream.name)[0 if self.desk.options.onto else 1]
        carrier = self.desk.carrier(self.tree, self.desk.upstream.name)
        before = gitwork.commit_of(self.tree, PRISTINE_TAG)
        for patch, commit in zip(self._members(), commits, strict=True):
            result = gitwork.commit_of(self.tree, commit)
            carriers.note(folder, patch, carrier.difference(patch, before, result))
            before = result
        git("reset", "-q", "--hard", commits[-1], cwd=self.tree)

    def _finish(self, after: Path, parent: str, commit: str, results: Results) -> Done:
        subject = description.Subject(
            self.patch,
            [p for p in self._members() if p != self.patch],
            self.desk.upstream.label,
            self.desk.contracts,
            known.load(self.desk.shared),
        )
        template = after / description.TEMPLATE
        text, unknown = description.render(
            template.read_text(encoding="utf-8") if template.is_file() else description.DEFAULT, subject, results
        )
        made = Exported(
            self.patch.name,
            self.patch.sha256,
            self.desk.upstream.commit,
            parent,
            commit,
            self.branch,
            self.state.gitdir,
            self.state.ref,
        )
        folder = self.desk.result(self.patch, self.desk.upstream)
        unchanged = self._unchanged(folder, made, text)
        if not unchanged:
            place.put(folder, after, made, text)
        shutil.rmtree(self.folder)
        return Done(made, results, folder, len(self.state.stack), unknown, unchanged)

    def _unchanged(self, folder: Path, made: Exported, text: str) -> bool:
        there = folder / place.DESCRIPTION
        same = record.exported(folder) == made and there.is_file() and there.read_text(encoding="utf-8") == text
        tip = place.branch_tip(Path(made.gitdir) if made.gitdir else folder / place.TREE, made.branch) if same else None
        return tip == made.commit

    def _require_free(self, commit: str) -> None:
        folder = self.desk.result(self.patch, self.desk.upstream)
        place.require_free(folder, self.desk.shown(folder), self.desk.gitdir, self.branch, commit)

    @property
    def _shown(self) -> Path:
        return self.desk.shown(self.tree)

    def _stop(self, name: str | None, message: str) -> NoReturn:
        """Leave the tree to a person."""
        self.state.waiting, self.state.stopped = True, name
        self.state.asked.append(name or self.patch.name)
        self.state.save(self.folder)
        command = self.desk.command("export-pr.sh", self.patch)
        raise NeedsPerson(
            f"{message}: edit it in {self._shown} with ordinary git, then run {command} --continue "
            f"(--abort throws it away)"
        )
