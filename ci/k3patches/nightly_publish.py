"""Bring the outcomes of a nightly run to the host: a pull request a new base, an issue where a person is needed.

There is one of each a target, found again the next night.  What a person did to them stands: a branch that
somebody pushed to is not overwritten, and what somebody turned down is not asked again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from k3patches import nightly_status, nightly_upstream
from k3patches import nightly_text as text
from k3patches.errors import UserError
from k3patches.git import IDENTITY, git
from k3patches.nightly_find import Target
from k3patches.nightly_host import Host, Issue
from k3patches.nightly_run import Outcome, Result, folders
from k3patches.project import Project

LABEL = "k3-rebase"
WORKFLOW = "test.yml"


@dataclass
class Publisher:
    """Publish into the repository that ``project`` is a checkout of."""

    project: Project
    host: Host

    def __post_init__(self) -> None:
        self._issues = self.host.issues(LABEL)

    def publish(self, outcome: Outcome) -> None:
        target = outcome.target
        if outcome.result is Result.REBASED and target.is_release:
            commit, broken = self._commit(outcome)
            if not commit:
                click.echo(f"{target.label}: {'; '.join(broken)}: an issue and no pull request")
                self._issue(outcome, broken)
                return
            where = self._pull_request(outcome, commit)
            self._settle(target, f"The series carries over now: {where}" if where else "The series carries over now.")
        elif outcome.result in (Result.REBASED, Result.NOTHING):
            self._settle(target, "The series carries over now.")
        elif outcome.result in (Result.PERSON, Result.BROKEN):
            self._issue(outcome)
        else:
            # The run that failed says so itself; it tells nothing of the series.
            click.echo(f"{target.label}: {outcome.result.words}, nothing to publish")

    def settle_known(self) -> None:
        """Close the issues of releases that have a series by now, whoever made it."""
        for release in self.project.releases:
            self._settle(Target(release), f"patches/v{release} is there now.")

    def _issue(self, outcome: Outcome, broken: Sequence[str] = ()) -> None:
        target = outcome.target
        title, body = text.issue_title(target), text.issue_body(outcome, broken)
        issue = self._issue_of(target)
        if issue is None:
            self.host.open_issue(title, body, LABEL)
        elif issue.declined:
            click.echo(f"{target.label}: issue {issue.number} was closed as not planned and stays so")
        else:
            self.host.update_issue(issue, title, body)

    def _settle(self, target: Target, why: str) -> None:
        issue = self._issue_of(target)
        if issue and issue.open:
            self.host.close_issue(issue, why)
            self._issues.remove(issue)

    def _issue_of(self, target: Target) -> Issue | None:
        mine = [
            issue
            for issue in self._issues
            if text.marker(target) in issue.body or issue.title == text.issue_title(target)
        ]
        return next((issue for issue in mine if issue.open), mine[-1] if mine else None)

    def _pull_request(self, outcome: Outcome, commit: str) -> str | None:
        """Open or update the pull request for ``commit``; how it is called, or ``None`` where a person has the say."""
        target = outcome.target
        branch = f"k3-rebase/v{target.name}"
        pull = next(iter(self.host.pull_requests(branch)), None)
        if pull and not pull.open and not pull.merged:
            click.echo(f"{target.label}: pull request {pull.number} was closed unmerged and stays so")
            return None
        head = self.host.head(branch)
        if head and not self._ours(head):
            click.echo(f"{target.label}: {branch} has commits of a person's and stays as it is")
            return None
        if not head or not self._same(head, commit):
            self.host.push(commit, branch, head)
            self.host.start(WORKFLOW, branch)
        title, body = text.pull_title(target), text.pull_body(outcome)
        if pull and pull.open:
            self.host.update_pull_request(pull, title, body)
            return f"#{pull.number}"
        return self.host.open_pull_request(branch, self._branch(), title, body)

    def _commit(self, outcome: Outcome) -> tuple[str | None, list[str]]:
        """Commit what the engine wrote, and the status of it, on top of this checkout's commit.

        The checkout itself stays as it is.  Where the status has a broken cell, there is no commit but a word on each.
        """
        root, tree = self.project.root, self.project.root / "build" / "nightly-tree"
        files = outcome.files()
        if f"patches/v{outcome.target.name}/series" not in files:
            raise UserError(f"{outcome.target.label}: the engine wrote no series: look at {outcome.folder}")
        date = datetime.fromisoformat(git("show", "-s", "--format=%cI", "HEAD", cwd=root).strip())
        shutil.rmtree(tree, ignore_errors=True)
        git("worktree", "prune", cwd=root)
        git("worktree", "add", "-q", "--detach", tree, "HEAD", cwd=root)
        try:
            for name in folders(outcome.target):
                shutil.rmtree(tree / name, ignore_errors=True)
            for name, content in files.items():
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            for part in (nightly_status, nightly_upstream):
                if broken := part.add(tree, outcome.target.name, outcome.folder):
                    return None, broken
            git("add", "-A", "-f", "patches", nightly_status.README, cwd=tree)
            git("commit", "-q", "--no-verify", "-m", text.commit_message(outcome.target), cwd=tree, date=date)
            return git("rev-parse", "HEAD", cwd=tree).strip(), []
        finally:
            git("worktree", "remove", "--force", tree, cwd=root)

    def _ours(self, head: str) -> bool:
        """Whether all that a branch adds was committed by this program."""
        people = git("log", "--format=%ce", f"HEAD..{head}", cwd=self.project.root).split()
        return set(people) <= {IDENTITY[1]}

    def _same(self, head: str, commit: str) -> bool:
        """Whether two commits make the same change; that the checkout went on is no reason to push again."""

        def change(of: str) -> list[str]:
            start = git("merge-base", "HEAD", of, cwd=self.project.root).strip()
            told = git("diff", "--unified=0", "--text", "--no-renames", start, of, cwd=self.project.root)
            # Where in README.md the table stands, and what else is in there, is none of it.
            return [line for line in told.split("\n") if not line.startswith(("@@ ", "index "))]

        return change(head) == change(commit)

    def _branch(self) -> str:
        """What a pull request is to be merged into: the branch that is checked out."""
        return git("branch", "--show-current", cwd=self.project.root).strip() or self.host.default_branch
