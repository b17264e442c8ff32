"""The rebase: which fixes the target has, what is carried, whether it still does its job, and the new series."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from k3patches import base as bases
from k3patches import contracts, locks, messages, release, series
from k3patches.base import Base
from k3patches.contracts import Outcome
from k3patches.errors import UserError
from k3patches.git import git
from k3patches.messages import CONTRACT
from k3patches.project import Project
from k3patches.rebase import carry, fit, gitwork, kept, plan, publish, resolutions, state
from k3patches.rebase import target as targets
from k3patches.rebase.bench import Bench
from k3patches.rebase.carry import Labels
from k3patches.rebase.errors import Broken, NeedsPerson, Result
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.merger import Merger
from k3patches.rebase.plan import Candidate, Step
from k3patches.rebase.progress import Progress
from k3patches.rebase.record import Recorder
from k3patches.rebase.report import Carried, Fix, Report
from k3patches.rebase.resolutions import Recorded
from k3patches.rebase.since import since
from k3patches.rebase.state import State
from k3patches.rebase.store import Store
from k3patches.rebase.target import Target
from k3patches.series import Patch
from k3patches.source import Source
from k3patches.tree import PRISTINE_TAG


@dataclass(frozen=True)
class Options:
    """What the command line says beside the target."""

    base: str | None
    cache: Path
    python: str
    report: Path | None = None
    fresh: bool = False
    record: bool = False
    take: Path | None = None


class Rebase:
    """One target's rebase; its folder is ``build/rebase/NAME``."""

    def __init__(self, project: Project, target: Target, options: Options) -> None:
        self.project, self.target, self.options = project, target, options
        self.root = project.root / "build" / "rebase"
        self.folder = self.root / target.name
        self.tree, self.pristine = self.folder / "tree", self.folder / "pristine"
        self.log = self.folder / "contracts.log"
        self.store = Store(self.root)
        self.bench = Bench(
            project.root / "tests" / "contracts", options.python, self.root / "outcomes", fresh=options.fresh
        )
        if target.release:
            self.series_dir = project.root / "patches" / target.name
            self.resolutions_dir = project.root / "patches" / "resolutions" / target.name
        else:
            self.series_dir, self.resolutions_dir = self.folder / "series", self.folder / "resolutions"
        self.state = State(target.wanted, target.git, [])
        self.progress = Progress(self.state.seconds)
        self.report = Report(target.label)
        self._steps: list[Step] = []

    @contextmanager
    def lock(self) -> Iterator[None]:
        busy = f"another rebase onto {self.target.label} is running: wait for it, or end it"
        with locks.held(self.root / f".{self.target.name}.lock", busy):
            yield

    # What the command line asks for.

    def abort(self) -> None:
        """Leave nothing of this rebase."""
        self._mend()
        if not self.folder.exists():
            raise UserError(f"no rebase onto {self.target.label} was kept: there is nothing to abort")
        shutil.rmtree(self.folder)

    def run(self, go_on: bool) -> Result:
        """Start, or ``go_on`` in the kept tree, to the end; the report is written however it ends."""
        self._mend()
        left = state.load(self.folder)
        if go_on:
            if not left or not left.person:
                raise UserError(f"no rebase onto {self.target.label} waits for anybody: start one without --continue")
            self.state, self.progress = left, Progress(left.seconds)
        elif left and left.person:
            raise NeedsPerson(
                f"{self._shown} holds a rebase that somebody was asked to edit: go on with --continue, or throw it "
                f"away with --abort"
            )
        try:
            result = self._run(go_on)
        except (NeedsPerson, Broken) as e:
            self.report.result, self.report.why = Result(e.exit_code), e.message
            self._write_report()
            raise
        self.report.result = result
        self._write_report()
        return result

    def look_ahead(self) -> None:
        """Unpack the target and run the contracts on it as released: :meth:`run` finds both done.

        That asks for nothing of any series, and so can go on while the one to carry is still made.
        """
        for left in (self.pristine, self.folder / "scratch"):
            shutil.rmtree(left, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        pristine = self.store.pristine(self._source)
        gitwork.work_tree(self.pristine, pristine, [self.store.objects])
        self.bench.run(self.pristine, self.bench.fixes, self.log, in_short=True, jobs=1)
        self.progress.say(f"looked ahead: contracts on pristine {self.target.label}")

    # The steps.

    def _run(self, go_on: bool) -> Result:
        if not go_on:
            self._set_up()
        else:
            self._take_over()
        failing, outcomes = self._decide()
        recorded = resolutions.load(self.resolutions_dir)
        found = plan.candidates(self._series())
        plain, self._steps = plan.steps(found, failing, recorded)
        self._tell_plan(found, outcomes)
        merger = Merger(self.project, self.store, self.options.cache, self.target.label, failing)
        if self.options.record or self.options.take:
            self._take_series()
            self.state.dropped = [step.key for step in self._steps if not self._done(step)]
        else:
            self._carry(merger, recorded)
        commits = self._tidy(failing)
        self._check(commits, outcomes)
        return self._publish(commits, plain, merger, outcomes)

    def _set_up(self) -> None:
        for left in (self.tree, self.pristine, self.folder / "scratch"):
            shutil.rmtree(left, ignore_errors=True)
        (self.folder / state.FILE).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.record and not (self.series_dir / series.SERIES_FILE).is_file():
            raise UserError(f"{self.target.label} has no series to record: rebase onto it without --record first")
        self.state.series = publish.fingerprint(self.series_dir)
        self.state.bases = targets.nearest(self.project, self.target, self.options.base)
        with self.progress.step(f"source of {self.target.label}"):
            pristine = self.store.pristine(self._source)
            gitwork.work_tree(self.tree, pristine, [self.store.objects])
            gitwork.work_tree(self.pristine, pristine, [self.store.objects])
        if self.target.version is None and not self.options.base:
            nearest = fit.best(self.project, self.tree)
            self.progress.say(f"  nearest to {nearest}")
            self.state.bases = targets.nearest(self.project, self.target, nearest.release)
        if self.options.take:
            kept.check_takeable(self.options.take, self.tree, self.target)
        self.state.head = pristine
        self.state.save(self.folder)

    @cached_property
    def _source(self) -> Source:
        return self.target.source(self.project, self._pin(), self.options.cache)

    def _pin(self) -> Base | None:
        """What is pinned of a release; the pins that are committed already stay what they are."""
        if not self.target.release:
            return None
        base = targets.pinned(self.project, self.target)
        if not base:
            scratch = self.folder / "scratch"
            scratch.mkdir()
            base = release.pin(self.target.release, self.options.cache, scratch)
            shutil.rmtree(scratch)
        (self.folder / bases.FILE).write_text(bases.render(base))
        return base

    def _take_over(self) -> None:
        """Take the tree back from the person: their edit becomes the commit of the patch that waited."""
        if not self.state.waiting:
            # Killed while it went on: whatever is not committed is the engine's own.
            git("reset", "-q", "--hard", self.state.head, cwd=self.tree)
            git("clean", "-q", "-f", "-d", cwd=self.tree)
        else:
            kept.take_back(self.tree, self._shown)
        self.state.waiting = False
        self.state.head = gitwork.head(self.tree)
        self.state.save(self.folder)

    def _decide(self) -> tuple[set[str], dict[str, Outcome]]:
        """Run all contracts on the pristine target: the fixes that it lacks, and how each did."""
        with self.progress.step(f"contracts on pristine {self.target.label}"):
            outcomes = self.bench.run(self.pristine, self.bench.fixes, self.log, in_short=True)
        failing = {fix for fix, o in outcomes.items() if not o.holds and not o.is_absent}
        self.report.fixes = [
            Fix(fix, str(o), "" if fix in failing else "native" if o.holds else "absent")
            for fix, o in sorted(outcomes.items())
        ]
        return failing, outcomes

    def _series(self) -> list[tuple[str, list[Patch]]]:
        loaded = [(name, series.load(self.project.series_dir(name))) for name in self.state.bases]
        for name, patches in loaded:
            for patch in patches:
                for fix in patch.contracts:
                    if fix not in self.bench.fixes:
                        raise UserError(f"{patch.name} of vLLM {name} is for {fix}, which has no contract: write one")
        self.report.source = f"vLLM {self.state.bases[0]}"
        return loaded

    def _tell_plan(self, found: Sequence[Candidate], outcomes: Mapping[str, Outcome]) -> None:
        for candidate in found:
            how = [outcomes[fix] for fix in candidate.fixes]
            if all(o.holds or o.is_absent for o in how):
                why = "native" if any(o.holds for o in how) else "absent"
                self.report.dropped[candidate.fixes[0]] = (candidate.patch.name, candidate.release, why)
                self.progress.say(f"  {candidate.patch.name} of vLLM {candidate.release}: dropped, {why}")
        planned = {fix for step in self._steps for fix in step.fixes}
        for fix in self.report.fixes:
            fix.state = fix.state or ("pending" if fix.fix in planned else "broken")

    def _carry(self, merger: Merger, recorded: Recorded) -> None:
        waiting = [step for step in self._steps if step.key == self.state.stopped]
        if self.state.stopped and not any(self._done(step) for step in waiting):
            self.progress.say(f"{self.state.stopped}: left out by hand")
            self.state.dropped.append(self.state.stopped)
        self.state.stopped = None
        with self.progress.step("carrying patches"):
            for step in self._steps:
                if self._done(step) or step.key in self.state.dropped:
                    continue
                self._carry_one(step, merger, recorded.mails.get(step.key))
                self.state.head = gitwork.head(self.tree)
                self.state.save(self.folder)

    def _take_series(self) -> None:
        """Take the series that is committed, or the commits of a tree, for the result that a person wants."""
        pristine = gitwork.pristine(self.tree)
        if self.options.take:
            result = kept.take_commits(self.options.take, self.tree, self.target)
        else:
            result = [pristine, *self.store.series(pristine, series.load(self.series_dir))][-1]
        git("reset", "-q", "--hard", result, cwd=self.tree)

    def _done(self, step: Step) -> bool:
        there = {fix for c in gitwork.above(self.tree, PRISTINE_TAG) for fix in messages.fixes(c.message)}
        return bool(there & set(step.fixes))

    def _carry_one(self, step: Step, merger: Merger, mail: Path | None) -> None:
        before = gitwork.commit_of(self.tree)
        merged = merger.merge(self.tree, step, before)
        if mail:
            fits = carry.resolve(self.tree, before.id, merged.content, mail)
            if fits and not self._marked(merger.labels(step), before):
                self.state.resolved.append(step.key)
                self.progress.say(f"  {self._name(step)}: by the recorded resolution")
                return
            git("reset", "-q", "--hard", before.id, cwd=self.tree)
            merged = merger.merge(self.tree, step, before)
            why = f"what {mail.relative_to(self.project.root)} records no longer fits"
        elif merged.conflicts:
            why = f"{len(merged.conflicts)} files in conflict"
        elif merged.content == before.tree:
            why = "nothing is left of it, though its contract fails without it"
        else:
            self.progress.say(f"  {self._name(step)}: clean")
            return
        self.report.conflicts[step.key] = merged.conflicts
        for conflict in merged.conflicts:
            self.progress.say(f"    {conflict.path}: {conflict.how}, {len(conflict.hunks)} hunks")
        self._stop(
            step.key,
            f"{self._name(step)} needs a person on {self.target.label}, {why}: edit it in {self._shown}, then run "
            f"{self._command('--continue')} (git cherry-pick --skip leaves the patch out, --abort all)",
        )

    def _marked(self, labels: Labels | None, before: Commit) -> bool:
        """Whether the resolution left a conflict marker."""
        if not labels:
            return False
        changed = git("diff", "--name-only", "-z", before.id, "HEAD", cwd=self.tree).split("\0")
        return bool(carry.markers(self.tree, labels, [p for p in changed if p]))

    def _tidy(self, failing: set[str]) -> list[Commit]:
        """Leave in all trailers only fixes that have a patch in this series, and return the commits."""
        available: set[str] = set()
        parent = gitwork.pristine(self.tree)
        for commit in gitwork.above(self.tree, PRISTINE_TAG):
            if len(git("rev-list", "--parents", "-1", commit.id, cwd=self.tree).split()) != 2:
                self._stop(None, f"{commit.id[:12]} in {self._shown} is a merge: make it a line of commits")
            for fix in messages.fixes(commit.message):
                if fix not in self.bench.fixes:
                    self._stop(None, f"commit {commit.id[:12]} in {self._shown} is for {fix}, which has no contract")
            message = messages.trimmed(commit.message, failing, available)
            fixes = messages.fixes(message)
            if not fixes:
                self._stop(
                    None,
                    f"commit {commit.id[:12]} ({messages.subject(commit.message)}) in {self._shown} names no fix that "
                    f"{self.target.label} lacks: add a {CONTRACT} trailer, or leave it out; then run "
                    f"{self._command('--continue')}",
                )
            available.update(fixes)
            if gitwork.commit_of(self.tree, parent).tree == commit.tree:
                self._stop(None, f"commit {commit.id[:12]} in {self._shown} changes nothing: leave it out")
            parent = gitwork.write_commit(self.tree, commit.tree, parent, message, commit.author)
        git("reset", "-q", "--soft", parent, cwd=self.tree)
        self.state.head = parent
        self.state.save(self.folder)
        return gitwork.above(self.tree, PRISTINE_TAG)

    def _check(self, commits: Sequence[Commit], before: Mapping[str, Outcome]) -> None:
        """Run all contracts on the carried series: each must hold, or be absent."""
        with self.progress.step(f"contracts on {self.target.label} with {len(commits)} patches"):
            after = self.bench.run(self.tree, self.bench.fixes, self.log)
        patched = {fix for c in commits for fix in messages.fixes(c.message)}
        for fix in self.report.fixes:
            outcome = after[fix.fix]
            fix.patched = str(outcome)
            if outcome.holds:
                fix.state = "native" if before[fix.fix].holds else "patched"
            elif not outcome.is_absent:
                fix.state = "needs a person" if fix.fix in patched or before[fix.fix].holds else "broken"
            else:
                fix.state = "absent" if before[fix.fix].is_absent else "needs a person"
            if fix.state in ("needs a person", "broken"):
                fix.told = contracts.failures(self.log, fix.fix)
        useless = [f.fix for f in self.report.fixes if f.state == "needs a person"]
        alone = [f.fix for f in self.report.fixes if f.state == "broken"]
        self._tell_carried()
        if useless:
            self._stop(
                None,
                f"on {self.target.label} the contract of {', '.join(useless)} does not hold, though its patch was "
                f"carried: amend its commit in {self._shown} with ordinary git, then run {self._command('--continue')}",
            )
        if alone:
            self._stop(
                None,
                f"{self.target.label} lacks {', '.join(alone)}, and no patch here is for it: write one as a commit "
                f"in {self._shown}, then run {self._command('--continue')}",
                Broken,
            )

    def _tell_carried(self) -> None:
        commits = [c for c in gitwork.above(self.tree, PRISTINE_TAG) if messages.fixes(c.message)]
        self.report.carried = [self._carried(c) for c in commits]
        there = {fix for carried in self.report.carried for fix in carried.fixes}
        left = [s for s in self._steps if not set(s.fixes) & there and s.key not in self.state.dropped]
        self.report.pending = {s.key: self._name(s) for s in left}

    def _carried(self, commit: Commit) -> Carried:
        fixes = messages.fixes(commit.message)
        step = next((s for s in self._steps if set(s.fixes) & set(fixes)), None)
        key = step.key if step else fixes[0]
        candidate = step.candidate if step else None
        how = "resolution" if key in self.state.resolved else "person" if key in self.state.asked else "clean"
        how = "new" if not candidate and how == "clean" else how
        return Carried.of(self.tree, self.folder, commit, key, fixes, candidate, how)

    def _publish(
        self, commits: list[Commit], plain: Sequence[Step], merger: Merger, before: Mapping[str, Outcome]
    ) -> Result:
        with self.progress.step("writing the series"):
            recorded = Recorder(self.tree, self.folder / "scratch", merger).record(commits, plain, self._steps)
            self._tell_how(recorded)
            mails = publish.patches(self.tree, commits)
            files = publish.others(self.series_dir) | mails
            files[series.SERIES_FILE] = publish.series_file(list(mails), self.target.label, self.series_dir)
            if self.target.release:
                native, absent = since(self.project, self.target.release, self.state.bases, before)
                for fix in self.report.fixes:
                    fix.since = native.get(fix.fix) or absent.get(fix.fix) or ""
                base = bases.load(self.folder)
                files[bases.FILE] = publish.base_file(base, native, absent)
            self.report.where = str(self.series_dir.relative_to(self.project.root))
            same = publish.same(self.series_dir, files) and publish.same(self.resolutions_dir, recorded)
            if not same:
                # Resolutions first: with them, whatever a kill leaves undone is done again the same way.
                with self.project.lock():
                    self._check_unchanged()
                    publish.put(self.resolutions_dir, recorded, self.folder / "stage-resolutions")
                    publish.put(self.series_dir, files, self.folder / "stage-series")
            if self.target.release:
                self.store.remember(self.tree, list(mails.values()))
        (self.folder / state.FILE).unlink()
        for path in (self.tree, self.pristine, self.folder / "scratch"):
            shutil.rmtree(path, ignore_errors=True)
        for file in (self.folder / bases.FILE, self.log):
            file.unlink(missing_ok=True)
        return Result.NOTHING_TO_DO if same else Result.REBASED

    def _check_unchanged(self) -> None:
        """What somebody wrote while this rebase ran is not overwritten."""
        if publish.fingerprint(self.series_dir) != self.state.series:
            again = "and rebase again"
            if self.state.person:
                again = f"copy {self._shown}, whose commits are yours, elsewhere, --abort, and rebase with --take COPY"
            raise UserError(
                f"{self.report.where} was changed while the rebase onto {self.target.label} ran: look at what changed, "
                f"{again}"
            )

    def _tell_how(self, recorded: Mapping[str, bytes]) -> None:
        own = {step.key for step in self._steps if not step.candidate}
        for patch in self.report.carried:
            if patch.how != "resolution":
                new = patch.key in own or not patch.source
                patch.how = "clean" if f"{patch.key}.patch" not in recorded else "new" if new else "person"

    # Ends and leftovers.

    @property
    def _shown(self) -> Path:
        """The kept tree as messages name it: a report is read on other machines as well."""
        return self.tree.relative_to(self.project.root)

    def _stop(self, key: str | None, message: str, kind: type[UserError] = NeedsPerson) -> NoReturn:
        """Leave the tree to a person."""
        self.state.person = self.state.waiting = True
        self.state.stopped = key
        if key:
            self.state.asked.append(key)
        self.state.save(self.folder)
        self._tell_carried()
        raise kind(message)

    def _write_report(self) -> None:
        self.report.seconds = list(self.state.seconds)
        folders = [self.folder, *([self.options.report] if self.options.report else [])]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            self.report.write(folder)

    def _mend(self) -> None:
        publish.mend(self.resolutions_dir, self.folder / "stage-resolutions")
        publish.mend(self.series_dir, self.folder / "stage-series")

    def _name(self, step: Step) -> str:
        if not step.candidate:
            return f"{step.key} (a patch of this base's own)"
        return f"{step.candidate.patch.name} of vLLM {step.candidate.release}"

    def _command(self, option: str) -> str:
        # What looks like a release is one, unless it is said to be a git ref.
        return f"ci/rebase.sh {self.target.wanted} {option}" + (" --git" if self.target.git else "")
