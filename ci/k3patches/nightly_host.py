"""The host of the repository, through its command line gh.  Nothing here knows of vLLM or of patches.

Everything goes through ``gh api``, whose routes and answers are the host's documented REST interface, the same
in every version of gh; gh finds the repository from the checkout's remote or GH_REPO, and its token in GH_TOKEN.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import click

from k3patches.errors import UserError
from k3patches.git import GitError, git_as_user

REMOTE = "origin"
# The checkout holds no token; git asks gh for it when a remote wants one, and no helper before it.
CREDENTIALS = ("-c", "credential.helper=", "-c", "credential.helper=!gh auth git-credential")
Json = dict[str, Any]


@dataclass(frozen=True)
class Issue:
    number: int
    title: str
    body: str
    open: bool
    # A person closed it as something that won't be done.
    declined: bool


@dataclass(frozen=True)
class PullRequest:
    number: int
    title: str
    body: str
    open: bool
    merged: bool


@dataclass(frozen=True)
class Host:
    """The repository that the checkout ``root`` is of; with ``dry``, what would change is only told."""

    root: Path
    dry: bool = False

    @cached_property
    def _repository(self) -> Json:
        return cast(Json, self._ask("repos/{owner}/{repo}"))

    @property
    def default_branch(self) -> str:
        return str(self._repository["default_branch"])

    def issues(self, label: str) -> list[Issue]:
        """All issues with ``label``, open and closed, oldest first; only members of the repository can give it."""
        route = f"repos/{{owner}}/{{repo}}/issues?labels={label}&state=all&sort=created&direction=asc&per_page=100"
        return [
            Issue(
                number=found["number"],
                title=found["title"],
                body=found["body"] or "",
                open=found["state"] == "open",
                declined=found["state"] == "closed" and found.get("state_reason") == "not_planned",
            )
            for found in self._pages(route)
            # The host's list of issues holds pull requests as well.
            if "pull_request" not in found
        ]

    def open_issue(self, title: str, body: str, label: str) -> None:
        self._change(f"open an issue: {title}", "labels", {"name": label}, existing_ok=True)
        self._change(None, "issues", {"title": title, "body": body, "labels": [label]})

    def update_issue(self, issue: Issue, title: str, body: str) -> None:
        """Give an issue its text, and open it where it was closed."""
        wanted = {"title": title, "body": body, "state": "open"}
        if issue != Issue(issue.number, title, body, True, False):
            self._change(f"update issue {issue.number}: {title}", f"issues/{issue.number}", wanted, method="PATCH")

    def close_issue(self, issue: Issue, why: str) -> None:
        self._change(f"close issue {issue.number}: {why}", f"issues/{issue.number}/comments", {"body": why})
        done = {"state": "closed", "state_reason": "completed"}
        self._change(None, f"issues/{issue.number}", done, method="PATCH")

    def pull_requests(self, branch: str) -> list[PullRequest]:
        """The pull requests from ``branch`` of this repository, not of a fork's of that name; newest first."""
        owner = self._repository["owner"]["login"]
        route = f"repos/{{owner}}/{{repo}}/pulls?head={owner}:{branch}&state=all&per_page=100"
        found = [
            PullRequest(p["number"], p["title"], p["body"] or "", p["state"] == "open", bool(p["merged_at"]))
            for p in self._pages(route)
        ]
        return sorted(found, key=lambda p: -p.number)

    def open_pull_request(self, branch: str, base: str, title: str, body: str) -> str:
        wanted = {"head": branch, "base": base, "title": title, "body": body, "maintainer_can_modify": True}
        try:
            made = self._change(f"open a pull request from {branch}: {title}", "pulls", wanted)
            return str(made.get("html_url", branch))
        except UserError as e:
            if "not permitted to create" in str(e):
                raise UserError(
                    f"the repository does not let workflows open pull requests, so {branch} has none: allow it under "
                    f"Settings, Actions, General, or open it by hand"
                ) from None
            raise

    def update_pull_request(self, pull: PullRequest, title: str, body: str) -> None:
        if (pull.title, pull.body) != (title, body):
            wanted = {"title": title, "body": body}
            self._change(f"update pull request {pull.number}: {title}", f"pulls/{pull.number}", wanted, method="PATCH")

    def start(self, workflow: str, branch: str) -> None:
        """Start a workflow on ``branch``: a push with the workflow's own token starts none by itself."""
        self._change(f"start {workflow} on {branch}", f"actions/workflows/{workflow}/dispatches", {"ref": branch})

    def head(self, branch: str) -> str | None:
        """The commit that ``branch`` is at, fetched; ``None`` where there is no such branch."""
        ref = f"refs/heads/{branch}"
        if not self._git("ls-remote", REMOTE, ref):
            return None
        self._git("fetch", "-q", "--no-tags", REMOTE, ref)
        return self._git("rev-parse", "FETCH_HEAD").strip()

    def push(self, commit: str, branch: str, expected: str | None) -> None:
        """Put ``branch`` at ``commit``, provided that it still is where :meth:`head` found it."""
        ref = f"refs/heads/{branch}"
        if self.dry:
            click.echo(f"would push {commit[:12]} to {branch}")
            return
        click.echo(f"push {commit[:12]} to {branch}")
        self._git("push", "-q", f"--force-with-lease={ref}:{expected or ''}", REMOTE, f"{commit}:{ref}")

    def _git(self, *args: str) -> str:
        try:
            return git_as_user(*CREDENTIALS, *args, cwd=self.root)
        except GitError as e:
            raise UserError(
                f"git {args[0]} with {REMOTE} failed ({e.brief}): check the remote and gh's token"
            ) from None

    def _ask(self, route: str) -> Any:
        return json.loads(self._gh(route))

    def _pages(self, route: str) -> list[Json]:
        # gh prints one array a page, one after the other.
        text, found, decoder = self._gh(route, "--paginate").strip(), [], json.JSONDecoder()
        while text:
            page, end = decoder.raw_decode(text)
            found += page
            text = text[end:].lstrip()
        return found

    def _change(
        self, what: str | None, route: str, data: Mapping[str, Any], method: str = "POST", existing_ok: bool = False
    ) -> Json:
        if what:
            click.echo(f"would {what}" if self.dry else what)
        if self.dry:
            return {}
        try:
            told = self._gh(f"repos/{{owner}}/{{repo}}/{route}", "--method", method, "--input", "-", data=data)
        except UserError as e:
            if existing_ok and "already_exists" in str(e):
                return {}
            raise
        return cast(Json, json.loads(told)) if told.strip() else {}

    def _gh(self, route: str, *options: str, data: Mapping[str, Any] | None = None) -> str:
        try:
            done = subprocess.run(
                ["gh", "api", route, *options],
                cwd=self.root,
                input=json.dumps(data) if data is not None else "",
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise UserError("gh is not installed: install GitHub's command line, and log in or set GH_TOKEN") from None
        if done.returncode:
            # gh's own line comes last; what the host answered is on its standard output.
            said = " ".join((done.stderr.strip() + " " + done.stdout.strip()).split())
            raise UserError(f"gh api {route} failed ({said}): check gh's token and the workflow's permissions")
        return done.stdout
