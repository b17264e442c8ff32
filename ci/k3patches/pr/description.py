"""The text of a pull request, in the template that upstream's tree holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3patches.contracts import contract_file
from k3patches.pr.known import Ground
from k3patches.pr.runs import Results
from k3patches.series import Patch

TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
# Where upstream's tree has none.
DEFAULT = "## Purpose\n\n## Test Plan\n\n## Test Result\n"
HEADING = re.compile(r"^## +(.+?) *$", re.M)
# A rule or an HTML block ends the part that is to be filled in.
CLOSING = re.compile(r"^(---+|<details>.*)$", re.M)
NOTE = """\
<!-- To the submitter, before this is opened: read every changed line, run the searches that "Duplicate-work check"
names, say whether AI assistance was used, tick the boxes below yourself, and delete this comment. -->
"""


@dataclass(frozen=True)
class Subject:
    """What a description is of: ``stack`` are the patches below it on the branch, on ``upstream``."""

    patch: Patch
    stack: Sequence[Patch]
    upstream: str
    contracts: Path
    ground: Mapping[str, Ground]

    @property
    def title(self) -> str:
        return self.patch.subject


def render(template: str, subject: Subject, results: Results) -> tuple[str, list[str]]:
    """The description, and the headings of the template that nothing here has a text for."""
    texts = _texts(subject, results)
    if not any(match[1] in texts for match in HEADING.finditer(template)):
        template = DEFAULT
    headings = list(HEADING.finditer(template))
    parts, unknown = [NOTE], []
    for match, following in zip(headings, [*headings[1:], None], strict=True):
        rest = template[match.end() : following.start() if following else len(template)]
        end = CLOSING.search(rest)
        kept = rest[end.start() :].strip("\n") if end else ""
        if match[1] in texts:
            parts.append(f"{match[0]}\n\n{texts[match[1]]}")
        else:
            unknown.append(match[1])
            kept = rest.strip("\n")
            parts.append(match[0])
        if kept:
            parts.append(kept)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n", unknown


def _texts(subject: Subject, results: Results) -> dict[str, str]:
    root_cause = f"### Root cause, what users saw, and what is done\n\n{_body(subject.patch)}"
    others = [_duplicates(subject), *([_stack(subject)] if subject.stack else [])]
    plan, measured = _plan(subject, results), _results(subject, results)
    what = re.sub(r"^(\[[^\]]*\])+ ", "", subject.title)
    return {
        "Purpose": "\n\n".join([f"{what}.", root_cause, *others]),
        "Test Plan": plan,
        "Test Result": measured,
        # The template of later releases.
        "Overview": "\n\n".join([f"{what}.", *others[1:]]),
        "Claims": _claims(subject, results),
        "Validation": f"{plan}\n\n{measured}",
        "Details": "\n\n".join([root_cause, others[0]]),
    }


def _body(patch: Patch) -> str:
    """The message's body: a line a paragraph, as a line break in a pull request is one for the reader."""
    paragraphs = patch.message.body.split("\n\n")[1:]
    return "\n\n".join(_unwrapped(text) for text in paragraphs if text)


def _unwrapped(paragraph: str) -> str:
    lines: list[str] = []
    for line in paragraph.splitlines():
        if lines and not re.match(r"\s*([-*] |\d+[.)] )|    ", line):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _duplicates(subject: Subject) -> str:
    lines = ["### Duplicate-work check", ""]
    grounds = [subject.ground.get(fix, Ground()) for fix in subject.patch.contracts]
    entries = list(dict.fromkeys(entry for ground in grounds for entry in ground.entries))
    if entries:
        lines += ["Known on the same ground:", ""]
        lines += [f"- {entry.link}: {entry.what}" for entry in entries]
    else:
        lines.append("No pull request or issue of vLLM's is known to be on the same ground.")
    if not subject.patch.upstream_status.startswith("Pending"):
        lines += ["", f"Where this change stands: {subject.patch.upstream_status}."]
    words = list(dict.fromkeys(word for ground in grounds for word in ground.search))
    words = words or [subject.patch.contracts[0].replace("-", " ")]
    lines += [
        "",
        "This list is kept by hand. vLLM's open pull requests and issues were not searched when this text was made; "
        "the searches for it are:",
        "",
        "```bash",
        *(f'gh pr list --repo vllm-project/vllm --state open --search "{word}"' for word in words),
        *(f'gh issue list --repo vllm-project/vllm --state open --search "{word}"' for word in words),
        "```",
    ]
    return "\n".join(lines)


def _stack(subject: Subject) -> str:
    lines = ["### Stacked on", "", "The branch also holds what this change needs, each a pull request of its own:", ""]
    return "\n".join([*lines, *(f"- {patch.subject}" for patch in subject.stack)])


def _claims(subject: Subject, results: Results) -> str:
    lines = []
    for fix in subject.patch.contracts:
        lines.append(f"- {_promise(subject, fix)}")
    if results.contracts and not results.native:
        lines.append("- Each of these fails without the change and holds with it (see Validation).")
    return "\n".join(lines)


def _promise(subject: Subject, fix: str) -> str:
    """What the contract's first line promises."""
    text = (subject.contracts / contract_file(fix)).read_text(encoding="utf-8")
    try:
        told = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    except SyntaxError:
        told = ""
    told = (
        re.sub(rf"^(Contract )?{re.escape(fix)}: ", "", " ".join(told.split()))
        or f"{fix}, as {contract_file(fix)} has it."
    )
    return told[0].upper() + told[1:]


def _plan(subject: Subject, results: Results) -> str:
    lines = ["```bash"]
    python = [f for f in subject.patch.files if f.endswith(".py")]
    if results.test_files:
        lines += ["# the tests that this change brings, those that need no GPU", _command(results.test_files)]
    lines += ["# format and lint, with the repository's configuration"]
    lines += [f"ruff {how} {' '.join(python)}" for how in ("check", "format --check")]
    names = " ".join(f"tests/contracts/{contract_file(fix)}" for fix in subject.patch.contracts)
    lines += ["# behaviour tests from outside, of the project that this change comes from, not part of it"]
    lines += [f"pytest {names} --tree PATH_OF_THIS_BRANCH", "```"]
    promises = "\n".join(f"- `{contract_file(f)}`: {_promise(subject, f)}" for f in subject.patch.contracts)
    return "\n".join(lines) + f"\n\nWhat the behaviour tests ask:\n\n{promises}"


def _command(files: Sequence[str]) -> str:
    return f"pytest -v -m cpu_test {' '.join(files)}"


def _results(subject: Subject, results: Results) -> str:
    if results.unformatted is None:
        told = "ruff was not run: it is not installed where this text was made."
    elif results.unformatted:
        told = "ruff check and ruff format --check: " + "; ".join(results.unformatted) + "."
    else:
        told = "ruff check and ruff format --check pass on every file of this change."
    if results.without:
        return f"**Neither the tests nor the behaviour tests were run**: {results.without}.\n\n{told}"
    below = f" and the {len(subject.stack)} changes below" if len(subject.stack) > 1 else ""
    below = below or (" and the change below" if subject.stack else "")
    rows = ["| | without this change | with it |", "|---|---|---|"]
    if results.test_files:
        before, after = results.tests
        rows.append(f"| its own tests | {before} | {after} |")
    for fix, (lacking, having) in results.contracts.items():
        rows.append(f"| `{contract_file(fix)}` | {lacking} | {having} |")
    ran_on = f"Python {results.ran_on['python']}, torch {results.ran_on['torch']}, no GPU"
    lines = [f"On {subject.upstream}{below} ({ran_on}), number of tests:", "", *rows, "", told, ""]
    notes = []
    if results.hooks:
        notes += ["Left to do for the repository's pre-commit scripts:", ""]
        notes += [*(f"- {each}" for each in results.hooks), ""]
    if results.test_files and results.tests[0].ok:
        notes.append("The change's own tests pass without it as well.")
    notes += [f"`{contract_file(fix)}` holds without this change as well." for fix in results.native]
    notes.append("Not run: anything on a GPU, and an evaluation of a model's output.")
    return "\n".join([*lines, *notes])
