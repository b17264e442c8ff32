"""Trailers are what ``git interpret-trailers`` says, and nothing of a message is lost."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3patches import messages
from k3patches.git import plain_environment
from k3patches.messages import CONTRACT, DEPENDS_ON, Message

PICKED = "(cherry picked from commit 0123456789012345678901234567890123456789)"
FOLDED = f"""\
[Bugfix] A title

What was wrong.

{CONTRACT}: a-fix,
 b-fix
{DEPENDS_ON}: c-fix
Signed-off-by: A <a@example.com>
{PICKED}
"""
LINES = st.sampled_from(
    [
        "Contract: a-fix, b-fix",
        "Contract: a,",
        "  b",
        "\tc: d",
        "Depends-On : b-fix",
        "Signed-off-by: A <a@example.com>",
        "signed-off-by: a",
        PICKED,
        "prose that goes on",
        "prose: with a colon",
        "two words: are no key",
        "key:",
        ":no key",
        "https://example.com/x",
        "",
        "   ",
    ]
)


def of_git(message: str) -> list[tuple[str, str]]:
    """Keys and values as git has them."""
    command = ["git", "interpret-trailers", "--parse", "--no-divider"]
    done = subprocess.run(command, input=message, capture_output=True, text=True, check=True, env=plain_environment())
    pairs = [line.partition(":") for line in done.stdout.splitlines()]
    return [(key.rstrip(), value.strip()) for key, _, value in pairs]


# Another process each time, on a machine that may be busy.
@settings(deadline=None, max_examples=200)
@given(st.lists(LINES, max_size=9).map(lambda lines: "A title\n" + "".join(f"{line}\n" for line in lines)))
def test_they_are_those_that_git_reads(message: str) -> None:
    parsed = messages.parse(message)
    assert [(t.key, t.value) for t in parsed.trailers if t.key] == of_git(message)
    # Apart from white space between the parts, nothing is lost.
    assert str(parsed).split() == message.split()
    assert messages.parse(str(parsed)) == parsed


def test_a_folded_trailer_and_one_that_git_wrote() -> None:
    parsed = messages.parse(FOLDED)
    assert parsed.ids(CONTRACT) == ["a-fix", "b-fix"]
    assert parsed.values("Signed-off-by") == ["A <a@example.com>"]
    assert str(parsed) == FOLDED


def test_what_only_this_project_reads_goes() -> None:
    text = messages.without_own(FOLDED)
    assert text == f"[Bugfix] A title\n\nWhat was wrong.\n\nSigned-off-by: A <a@example.com>\n{PICKED}\n"


def test_a_message_of_nothing_but_own_trailers_keeps_its_text() -> None:
    assert messages.without_own(f"A title\n\nText.\n\n{CONTRACT}: a\n") == "A title\n\nText.\n"


@pytest.mark.parametrize(
    ("contracts", "depends_on", "block"),
    [
        (["a-fix", "b-fix"], ["c-fix"], f"{CONTRACT}: a-fix,\n b-fix\n{DEPENDS_ON}: c-fix\n"),
        (["b-fix"], [], f"{CONTRACT}: b-fix\n"),
        ([], ["c-fix"], f"{DEPENDS_ON}: c-fix\n"),
    ],
)
def test_only_some_ids_stay(contracts: list[str], depends_on: list[str], block: str) -> None:
    text = messages.trimmed(FOLDED, contracts, depends_on)
    assert text == FOLDED.partition(CONTRACT)[0] + block + FOLDED.partition("c-fix\n")[2]


def test_a_title_alone_has_none() -> None:
    assert messages.parse("Contract: a\n") == Message("Contract: a")
