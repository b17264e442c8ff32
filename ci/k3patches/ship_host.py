"""Tags and releases of the repository that a checkout is of, through git and gh.  Nothing here knows of vLLM."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from k3patches.errors import UserError
from k3patches.git import IDENTITY, GitError, git_as_user
from k3patches.nightly_host import CREDENTIALS, REMOTE


@dataclass(frozen=True)
class Releases:
    """With ``dry``, what would change is only told, and the host is not asked."""

    root: Path
    dry: bool = False

    def require_tag_free(self, tag: str) -> None:
        """See that no other commit than the one checked out has this tag."""
        here = self._commit_of(tag)
        if here and here != self._git("rev-parse", "HEAD"):
            raise UserError(f"{tag} is commit {here[:12]} already: check that out, or raise the revision in VERSION")

    def tag(self, tag: str, message: str) -> None:
        """Tag the commit that is checked out, with an annotation, here and on the remote."""
        if self.dry:
            click.echo(f"would tag {self._git('rev-parse', '--short=12', 'HEAD')} as {tag} and push it to {REMOTE}")
            return
        if not self._commit_of(tag):
            click.echo(f"tag {tag}")
            # Lines of the message that begin with # are headings.
            self._git(*self._identity(), "tag", "--annotate", "--cleanup=verbatim", "--message", message, tag)
        click.echo(f"push {tag}")
        # The remote refuses where it has the tag at another commit.
        self._git(*CREDENTIALS, "push", "-q", REMOTE, f"refs/tags/{tag}")

    def publish(self, tag: str, title: str, notes: str, files: Sequence[Path]) -> None:
        """Make a release of the tag with these files; it is a draft until all of them are there."""
        if self.dry:
            for path in files:
                click.echo(f"would attach {path.name} ({path.stat().st_size / 2**20:.1f} MiB)")
            click.echo(f"would publish the release {title}; --yes does it")
            return
        found = self._find(tag)
        if found is None:
            with tempfile.TemporaryDirectory() as folder:
                text = Path(folder) / "notes.md"
                text.write_text(notes, encoding="utf-8")
                self._gh("create", tag, "--verify-tag", "--draft", "--title", title, "--notes-file", str(text))
        elif not found:
            click.echo(f"{title} is published already and stays as it is")
            return
        for path in files:
            click.echo(f"attach {path.name}")
            self._gh("upload", tag, str(path), "--clobber")
        self._gh("edit", tag, "--draft=false")
        click.echo(f"published {title}")

    def _find(self, tag: str) -> bool | None:
        """Whether the tag's release is still a draft; ``None`` where there is none."""
        try:
            return bool(json.loads(self._gh("view", tag, "--json", "isDraft"))["isDraft"])
        except UserError as e:
            if "release not found" in str(e):
                return None
            raise

    def _commit_of(self, tag: str) -> str | None:
        try:
            return self._git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
        except UserError:
            return None

    def _identity(self) -> tuple[str, ...]:
        """Whose tag it is, where the user has no name of their own, as in a workflow."""
        try:
            git_as_user("config", "user.email", cwd=self.root)
        except GitError:
            return "-c", f"user.name={IDENTITY[0]}", "-c", f"user.email={IDENTITY[1]}"
        return ()

    def _git(self, *args: str) -> str:
        try:
            return git_as_user(*args, cwd=self.root).strip()
        except GitError as e:
            verb = next(a for a in args if a in ("tag", "push", "rev-parse"))
            raise UserError(f"git {verb} failed ({e.brief}): check the remote, gh's token and the tag") from None

    def _gh(self, *args: str) -> str:
        try:
            done = subprocess.run(
                ["gh", "release", *args], cwd=self.root, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise UserError("gh is not installed: install GitHub's command line, and log in or set GH_TOKEN") from None
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise UserError(f"gh release {args[0]} failed ({said}): check gh's token, and run it again")
        return done.stdout
