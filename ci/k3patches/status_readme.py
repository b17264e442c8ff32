"""The status table in the README, between two markers."""

from __future__ import annotations

from k3patches.contracts import State
from k3patches.errors import UserError
from k3patches.status import Table

BEGIN = "<!-- status table: written by ci/status.sh -->"
END = "<!-- end of the status table -->"


def render(table: Table) -> str:
    """Fix x release, in Markdown; what is broken stands out."""
    releases = list(table.columns)
    lines = ["| fix | " + " | ".join(releases) + " |", "|---" * (len(releases) + 1) + "|"]
    states = {r: {v.fix: v.state for v in column.verdicts} for r, column in table.columns.items()}
    for fix in table.fixes:
        cells = [_cell(states[r].get(fix)) for r in releases]
        lines.append(f"| `{fix}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def place(text: str, table: Table) -> str:
    """The README ``text`` with today's table between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"README.md needs one line {BEGIN!r} and, below it, one {END!r}: the table goes between them")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{render(table)}\n\n{END}{rest.partition(END)[2]}"


def _cell(state: State | None) -> str:
    return "not measured" if state is None else "**broken**" if state is State.BROKEN else state.value
