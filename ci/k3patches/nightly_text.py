"""What a nightly run writes for people: pull requests, issues, and the run's summary."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from k3patches.nightly_find import Target
from k3patches.nightly_run import Outcome, Result

# The host takes 65536 characters; what stands around a report needs some as well.
LONGEST = 60_000
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def marker(target: Target) -> str:
    """What finds a target's issue again, whatever its title has become."""
    return f"<!-- k3-rebase target: {target.name} -->"


def issue_title(target: Target) -> str:
    return f"{target.label}: the series needs a person"


def issue_body(outcome: Outcome, broken: Sequence[str] = ()) -> str:
    """Why a person is needed; ``broken`` is what the status table says of a series that was rebased."""
    target = outcome.target
    if outcome.result is Result.PERSON:
        why = f"The series does not carry over to {_where(target)} by itself."
    else:
        why = f"The series carries over to {_where(target)}, but not all of it does its job there."
    command = f"ci/rebase.sh {' '.join(target.arguments)}"
    way = f"To mend it, run `{command}` in a checkout and follow what it says."
    if broken:
        why = f"{why[:-1]}: {'; '.join(broken)}."
        way = f"To see it, run `{command}` and `ci/status.sh --base {target.name}` in a checkout."
    return _whole(f"{why} {way}", outcome)


def pull_title(target: Target) -> str:
    return f"{target.label}: the series, rebased"


def pull_body(outcome: Outcome) -> str:
    return _whole(f"The series for {outcome.target.label}, as `ci/rebase.sh {outcome.target.name}` made it.", outcome)


def commit_message(target: Target) -> str:
    return f"{pull_title(target)}\n\nWritten by ci/rebase.sh {target.name}, and the status table by ci/status.sh.\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a target."""
    rows = [f"| {_where(o.target)} | {o.result.words} | {o.seconds:.0f} |\n" for o in outcomes]
    return "| target | result | seconds |\n|---|---|---|\n" + "".join(rows)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The run's page: the table, and each report folded below it."""
    parts = ["# Nightly\n\n", table(outcomes)]
    for outcome in outcomes:
        head = f"<details><summary>{outcome.target.label}: {outcome.result.words}</summary>"
        parts.append(f"\n{head}\n\n{cut(quiet(outcome.report))}\n</details>\n")
    return "".join(parts)


def run_url() -> str | None:
    """The page of the workflow run that this is part of."""
    server, repository, run = (os.environ.get(f"GITHUB_{n}") for n in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    return f"{server}/{repository}/actions/runs/{run}" if server and repository and run else None


def cut(text: str, longest: int = LONGEST) -> str:
    """``text``, or its first lines and a word on the rest; a code block that the cut leaves open is closed."""
    if len(text) <= longest:
        return text
    kept, fence, length = [], "", 0
    for line, inside in _fenced(text):
        length += len(line)
        if length > longest:
            break
        kept.append(line)
        fence = inside
    end = f"{fence}\n" if fence else ""
    return f"{''.join(kept)}{end}\n_The rest is in the run's artifact._\n"


def quiet(text: str) -> str:
    """``text`` with nobody called: outside of a code block, an @ before a name would notify whoever is called so."""
    return "".join(line if fence else re.sub(r"@(?=\w)", "@\u200b", line) for line, fence in _fenced(text))


def _whole(head: str, outcome: Outcome) -> str:
    url = run_url()
    tail = f"\n[The run]({url}) has the report as JSON and the log.\n" if url else ""
    return f"{marker(outcome.target)}\n{head}\n\n{cut(quiet(outcome.report)).rstrip()}\n{tail}"


def _where(target: Target) -> str:
    return f"{target.label} at {target.commit[:12]}" if target.commit else target.label


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Each line, and the fence of the code block that it begins or stands in, if any."""
    fence = ""
    for line in text.splitlines(keepends=True):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and not line[match.end() :].strip():
            fence = ""
        yield line, fence
