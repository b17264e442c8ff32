"""The rebase: which fixes the target has, what is carried, whether it still does its job, and the new series."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

from k3patches import base as bases
from k3patches import fetch, release, series
from k3patches.base import Base
from k3patches.contracts import Outcome
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.project import Project
from k3patches.rebase import carry, gitwork, messages, plan, publish, resolutions, state
from k3patches.rebase import target as targets
from k3patches.rebase.bench import Bench
from k3patches.rebase.carry import Labels, Merge
from k3patches.rebase.errors import Broken, NeedsPerson, Result
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.plan import Candidate, Step
from k3patches.rebase.progress import Progress
from k3patches.rebase.report import Carried, Fix, Report
from k3patches.rebase.state import State
from k3patches.rebase.store import Store
from k3patches.rebase.target import Target
from k3patches.series import CONTRACT, Patch
from k3patches.source import Sdist
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
        # What automatic merges gave, by commit and the tree that they were carried onto.
        self._merges: dict[tuple[str, str], Merge] = {}
        self._sources: dict[str, list[Commit]] = {}
        self._steps: list[Step] = []

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / f".{self.target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another rebase onto {self.target.label} is running: wait for it, or end it") from None
        try:
            yield
        finally:
            lock.release()

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
        kept = state.load(self.folder)
        if go_on:
            if not kept or not kept.person:
                raise UserError(f"no rebase onto {self.target.label} waits for anybody: start one without --continue")
            self.state, self.progress = kept, Progress(kept.seconds)
        elif kept and kept.person:
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

    # The steps.

    def _run(self, go_on: bool) -> Result:
        if not go_on:
            self._set_up()
        else:
            self._take_over()
        failing, outcomes = self._decide()
        recorded = resolutions.load(self.resolutions_dir)
        found = plan.candidates(self._series())
        plain, steps = plan.steps(found, failing, recorded)
        self._steps = steps
        self._tell_plan(found, steps, outcomes)
        if self.options.record or self.options.take:
            self._take_series()
            self.state.dropped = [step.key for step in steps if not self._done(step)]
        else:
            self._carry(steps, failing)
        commits = self._tidy(failing)
        self._check(commits, outcomes)
        return self._publish(commits, plain, steps, failing, outcomes)

    def _set_up(self) -> None:
        for left in (self.tree, self.pristine, self.folder / "scratch"):
            shutil.rmtree(left, ignore_errors=True)
        (self.folder / state.FILE).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.record and not (self.series_dir / series.SERIES_FILE).is_file():
            raise UserError(f"{self.target.label} has no series to record: rebase onto it without --record first")
        self.state.bases = targets.nearest(self.project, self.target, self.options.base)
        with self.progress.step(f"source of {self.target.label}"):
            base = self._pin()
            source = self.target.source(self.project, base, self.options.cache)
            pristine = self.store.pristine(source)
            gitwork.work_tree(self.tree, pristine, [self.store.objects])
            gitwork.work_tree(self.pristine, pristine, [self.store.objects])
        self.state.head = pristine
        self.state.save(self.folder)

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
            self._finish_edit()
        self.state.waiting = False
        self.state.head = gitwork.head(self.tree)
        self.state.save(self.folder)

    def _finish_edit(self) -> None:
        untracked = git("ls-files", "--others", "--exclude-standard", "-z", cwd=self.tree).split("\0")[0]
        if untracked:
            raise NeedsPerson(f"{self._shown / untracked} belongs to no commit: git add it, or remove it")
        if (self.tree / ".git" / "rebase-merge").exists() or (self.tree / ".git" / "rebase-apply").exists():
            raise NeedsPerson(f"a git rebase or am of your own is under way in {self._shown}: finish it first")
        changed = [p for p in git("diff", "HEAD", "--name-only", "-z", cwd=self.tree).split("\0") if p]
        if left := carry.markers(self.tree, None, changed):
            raise NeedsPerson(
                f"{left[0]} in {self._shown} still is a conflict marker ({len(left)} in all): edit them out"
            )
        if gitwork.picking(self.tree):
            # A file that only one side has shows no markers: what becomes of it must be said.
            for path, letters in gitwork.unmerged(self.tree).items():
                if letters not in ("UU", "AA"):
                    raise NeedsPerson(f"{self._shown / path} is still undecided: git add it to keep it, or git rm it")
            git("add", "-u", cwd=self.tree)
            message = (self.tree / ".git" / "MERGE_MSG").read_text()
            picked = gitwork.commit_of(self.tree, "CHERRY_PICK_HEAD")
            content = git("write-tree", cwd=self.tree).strip()
            if content != gitwork.tree_of(self.tree):
                made = gitwork.write_commit(self.tree, content, gitwork.head(self.tree), message, picked.author)
                git("reset", "-q", "--hard", made, cwd=self.tree)
            else:
                git("reset", "-q", "--hard", cwd=self.tree)
        elif changed:
            raise NeedsPerson(
                f"{self._shown / changed[0]} is changed and not committed: commit it into the patch that it belongs to "
                f"(git commit --fixup COMMIT, then git rebase -i --autosquash {PRISTINE_TAG})"
            )

    def _decide(self) -> tuple[set[str], dict[str, Outcome]]:
        """Run all contracts on the pristine target: the fixes that it lacks, and how each did."""
        with self.progress.step(f"contracts on pristine {self.target.label}"):
            outcomes = self.bench.run(self.pristine, self.bench.fixes)
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

    def _tell_plan(self, found: Sequence[Candidate], steps: Sequence[Step], outcomes: Mapping[str, Outcome]) -> None:
        for candidate in found:
            how = [outcomes[fix] for fix in candidate.fixes]
            if all(o.holds or o.is_absent for o in how):
                why = "native" if any(o.holds for o in how) else "absent"
                self.report.dropped[candidate.fixes[0]] = (candidate.patch.name, candidate.release, why)
                self.progress.say(f"  {candidate.patch.name} of vLLM {candidate.release}: dropped, {why}")
        planned = {fix for step in steps for fix in step.fixes}
        for fix in self.report.fixes:
            fix.state = fix.state or ("pending" if fix.fix in planned else "broken")

    def _carry(self, steps: Sequence[Step], failing: set[str]) -> None:
        recorded = resolutions.load(self.resolutions_dir)
        if self.state.stopped and not self._done(self._step_of(steps, self.state.stopped)):
            self.progress.say(f"{self.state.stopped}: left out by hand")
            self.state.dropped.append(self.state.stopped)
        self.state.stopped = None
        with self.progress.step("carrying patches"):
            for step in steps:
                if self._done(step):
                    continue
                if step.key in self.state.dropped:
                    continue
                self._carry_one(step, failing, recorded)
                self.state.head = gitwork.head(self.tree)
                self.state.save(self.folder)

    def _take_series(self) -> None:
        """Take the series that is committed, or the commits of a tree, for the result that a person wants."""
        pristine = git("rev-parse", f"{PRISTINE_TAG}^{{commit}}", cwd=self.tree).strip()
        if self.options.take:
            result = self._taken(self.options.take, pristine)
        else:
            result = [pristine, *self.store.series(pristine, series.load(self.series_dir))][-1]
        git("reset", "-q", "--hard", result, cwd=self.tree)

    def _taken(self, other: Path, pristine: str) -> str:
        """The commits of ``other`` above its tag ``pristine`` or ``vX.Y.Z``, put on the commit ``pristine``."""
        try:
            tags = [tag for tag in (PRISTINE_TAG, self.target.name) if tag in git("tag", cwd=other).splitlines()]
        except GitError:
            tags = []
        if not tags or gitwork.tree_of(other, tags[0]) != gitwork.tree_of(self.tree, pristine):
            raise UserError(
                f"{other} has no tag '{PRISTINE_TAG}' or '{self.target.name}' on the source of {self.target.label}: "
                f"start from build/{self.target.name}/pristine, or another tree of exactly its files"
            )
        if git("rev-list", "--merges", f"{tags[0]}..HEAD", cwd=other) or git("status", "--porcelain", cwd=other):
            raise UserError(f"{other} has a merge or uncommitted changes: make it a line of commits")
        git("fetch", "-q", "--no-tags", other.resolve(), "HEAD", cwd=self.tree)
        result = pristine
        for commit in git("rev-list", "--reverse", f"{tags[0]}..HEAD", cwd=other).split():
            taken = gitwork.commit_of(self.tree, commit)
            result = gitwork.write_commit(self.tree, taken.tree, result, taken.message, taken.author)
        return result

    def _step_of(self, steps: Sequence[Step], key: str) -> Step:
        return next((s for s in steps if s.key == key), Step(key, (key,)))

    def _done(self, step: Step) -> bool:
        there = {fix for c in gitwork.above(self.tree, PRISTINE_TAG) for fix in messages.ids(c.message, CONTRACT)}
        return bool(there & set(step.fixes))

    def _carry_one(self, step: Step, failing: set[str], recorded: resolutions.Recorded) -> None:
        before = gitwork.commit_of(self.tree)
        merged = self._merge(self.tree, step, before, failing)
        mail = recorded.mails.get(step.key)
        if mail:
            if carry.resolve(self.tree, before.id, merged.content, mail) and not self._marked(step, before):
                self.state.resolved.append(step.key)
                self.progress.say(f"  {self._name(step)}: by the recorded resolution")
                return
            git("reset", "-q", "--hard", before.id, cwd=self.tree)
            if step.candidate:
                merged = self._merge(self.tree, step, before, failing, again=True)
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

    def _merge(self, tree: Path, step: Step, before: Commit, failing: set[str], again: bool = False) -> Merge:
        """Merge onto ``tree``'s HEAD, which is ``before``."""
        if not step.candidate:
            return Merge(before.tree, "", ("", "", ""), [])
        commit = self._source(step.candidate)
        labels = Labels.of(self.target.label, step.candidate.release, step.key)
        wanted = messages.trimmed(commit.message, step.fixes, failing)
        merged = carry.merge(tree, commit, wanted, labels)
        self._merges[commit.id, before.tree] = merged
        return merged

    def _source(self, candidate: Candidate) -> Commit:
        if candidate.release not in self._sources:
            folder = self.project.series_dir(candidate.release)
            base, patches = bases.load(folder), series.load(folder)
            source = Sdist(fetch.fetch(base.sdist, self.options.cache), base.sdist.sha256)
            commits = self.store.series(self.store.pristine(source), patches)
            self._sources[candidate.release] = [gitwork.commit_of(self.store.path, c) for c in commits]
        return self._sources[candidate.release][int(candidate.patch.number) - 1]

    def _marked(self, step: Step, before: Commit) -> bool:
        if not step.candidate:
            return False
        labels = Labels.of(self.target.label, step.candidate.release, step.key)
        changed = git("diff", "--name-only", "-z", before.id, "HEAD", cwd=self.tree).split("\0")
        return bool(carry.markers(self.tree, labels, [p for p in changed if p]))

    def _tidy(self, failing: set[str]) -> list[Commit]:
        """Leave in all trailers only fixes that have a patch in this series, and return the commits."""
        available: set[str] = set()
        parent = git("rev-parse", f"{PRISTINE_TAG}^{{commit}}", cwd=self.tree).strip()
        for commit in gitwork.above(self.tree, PRISTINE_TAG):
            if len(git("rev-list", "--parents", "-1", commit.id, cwd=self.tree).split()) != 2:
                self._stop(None, f"{commit.id[:12]} in {self._shown} is a merge: make it a line of commits")
            message = messages.trimmed(commit.message, failing, available)
            fixes = messages.ids(message, CONTRACT)
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
            after = self.bench.run(self.tree, self.bench.fixes)
        patched = {fix for c in commits for fix in messages.ids(c.message, CONTRACT)}
        for fix in self.report.fixes:
            outcome = after[fix.fix]
            fix.patched = str(outcome)
            if outcome.holds:
                fix.state = "native" if before[fix.fix].holds else "patched"
            elif not outcome.is_absent:
                fix.state = "needs a person" if fix.fix in patched or before[fix.fix].holds else "broken"
            else:
                fix.state = "absent" if before[fix.fix].is_absent else "needs a person"
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
        commits = [c for c in gitwork.above(self.tree, PRISTINE_TAG) if messages.ids(c.message, CONTRACT)]
        self.report.carried = [self._carried(c) for c in commits]
        there = {fix for carried in self.report.carried for fix in carried.fixes}
        left = [s for s in self._steps if not set(s.fixes) & there and s.key not in self.state.dropped]
        self.report.pending = {s.key: self._name(s) for s in left}

    def _carried(self, commit: Commit) -> Carried:
        fixes = messages.ids(commit.message, CONTRACT)
        step = next((s for s in self._steps if set(s.fixes) & set(fixes)), None)
        key = step.key if step else fixes[0]
        candidate = step.candidate if step else None
        how = "resolution" if key in self.state.resolved else "person" if key in self.state.asked else "clean"
        how = "new" if not candidate and how == "clean" else how
        return Carried.of(self.tree, self.folder, commit, key, fixes, candidate, how)

    def _publish(
        self,
        commits: list[Commit],
        plain: Sequence[Step],
        steps: Sequence[Step],
        failing: set[str],
        before: Mapping[str, Outcome],
    ) -> Result:
        with self.progress.step("writing the series"):
            recorded = self._record(commits, plain, steps, failing)
            mails = publish.patches(self.tree, commits)
            files = publish.others(self.series_dir) | mails
            files[series.SERIES_FILE] = publish.series_file(list(mails), self.target.label, self.series_dir)
            native, absent = self._since(before)
            for fix in self.report.fixes:
                fix.since = native.get(fix.fix) or absent.get(fix.fix) or ""
            if self.target.release:
                base = bases.load(self.folder)
                files[bases.FILE] = publish.base_file(base, native, absent)
            self.report.where = str(self.series_dir.relative_to(self.project.root))
            same = publish.same(self.series_dir, files) and publish.same(self.resolutions_dir, recorded)
            if not same:
                # Resolutions first: with them, whatever a kill leaves undone is done again the same way.
                with self.project.lock():
                    publish.put(self.resolutions_dir, recorded, self.folder / "stage-resolutions")
                    publish.put(self.series_dir, files, self.folder / "stage-series")
            if self.target.release:
                self.store.remember(self.tree, list(mails.values()))
        (self.folder / state.FILE).unlink()
        for path in (self.tree, self.pristine, self.folder / "scratch"):
            shutil.rmtree(path, ignore_errors=True)
        (self.folder / bases.FILE).unlink(missing_ok=True)
        return Result.NOTHING_TO_DO if same else Result.REBASED

    def _record(
        self, commits: Sequence[Commit], plain: Sequence[Step], steps: Sequence[Step], failing: set[str]
    ) -> dict[str, bytes]:
        """The folder of resolutions that makes the engine come to ``commits`` by itself."""
        by_fix = {fix: step for step in [*steps, *plain] for fix in step.fixes}
        files: dict[str, bytes] = {}
        order: list[str] = []
        parent = gitwork.commit_of(self.tree, PRISTINE_TAG)
        available: set[str] = set()
        scratch = None
        for commit in commits:
            fixes = messages.ids(commit.message, CONTRACT)
            step = next((by_fix[f] for f in fixes if f in by_fix and by_fix[f].key not in order), None)
            if not step:
                step = Step(fixes[0], (fixes[0],))
            order.append(step.key)
            merged = Merge(parent.tree, "", ("", "", ""), [])
            if step.candidate:
                known = self._merges.get((self._source(step.candidate).id, parent.tree))
                if not known:
                    scratch = scratch or self._scratch()
                    git("reset", "-q", "--hard", parent.id, cwd=scratch)
                    known = self._merge(scratch, step, parent, failing)
                merged = known
            by_itself = (merged.content, messages.trimmed(merged.message, failing, available), merged.author)
            if merged.conflicts or (commit.tree, commit.message, commit.author) != by_itself:
                # What was merged in the scratch tree is there alone, and that sees the kept tree's objects too.
                mail = carry.record(scratch or self.tree, parent.id, merged.content, commit)
                files[f"{step.key}.patch"] = mail
            self._tell_how(step, recorded=f"{step.key}.patch" in files)
            available.update(fixes)
            parent = commit
        dropped = [step.key for step in plain if step.key not in order]
        if dropped or order != [step.key for step in plain]:
            files[resolutions.ORDER_FILE] = resolutions.order_file(order, dropped)
        return files

    def _tell_how(self, step: Step, recorded: bool) -> None:
        for carried in self.report.carried:
            if carried.key == step.key and carried.how != "resolution":
                carried.how = "clean" if not recorded else "person" if step.candidate else "new"

    def _scratch(self) -> Path:
        scratch = self.folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        pristine = git("rev-parse", f"{PRISTINE_TAG}^{{commit}}", cwd=self.tree).strip()
        gitwork.work_tree(scratch, pristine, [self.store.objects, self.tree / ".git" / "objects"])
        return scratch

    def _since(self, before: Mapping[str, Outcome]) -> tuple[dict[str, str], dict[str, str]]:
        """Since which release each fix that needs no patch is native, or absent."""
        native: dict[str, str] = {}
        absent: dict[str, str] = {}
        if not self.target.release:
            return native, absent
        older = [bases.load(self.project.series_dir(name)) for name in self.state.bases]
        named = {
            name: {fix for p in series.load(self.project.series_dir(name)) for fix in p.contracts}
            for name in self.state.bases
        }
        for fix, outcome in before.items():
            if not outcome.holds and not outcome.is_absent:
                continue
            table = native if outcome.holds else absent
            table[fix] = self.target.release
            # Without a word of it in any older base, it has been so since the oldest without a patch for it.
            for base in older:
                told, other = (base.native, base.absent) if outcome.holds else (base.absent, base.native)
                if fix in other or fix in named[base.release]:
                    break
                table[fix] = told.get(fix, base.release)
                if fix in told:
                    break
        return native, absent

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
