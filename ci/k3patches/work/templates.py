"""What a new fix starts from: each piece says what belongs there, and none passes before it is written."""

from __future__ import annotations

from k3patches.lint import SPDX
from k3patches.messages import CONTRACT, UPSTREAM_STATUS

# Starts each line of a message that is still to be written.
LEFT = "TODO: "

MESSAGE = f"""\
{{subject}}

{LEFT}what was wrong, and in which file; name each changed file.

{LEFT}what the user saw, in their words: an error, a wrong number.

{LEFT}what is done about it.

{CONTRACT}: {{fix}}
{UPSTREAM_STATUS}: Pending [not yet submitted]
Signed-off-by: {{author}}
"""

CONTRACT_FILE = '''\
"""Contract {fix}: what a user is promised, in one sentence.

Written against no implementation, so that the same file runs on any release: it must fail on the source without
the patch and pass with it.  What does not exist on a release is a skip whose reason begins with "absent:".
"""

from __future__ import annotations

import pytest


def test_what_is_promised() -> None:
    pytest.fail("the contract {fix} is not written yet")
'''

TEST_FILE = f'''\
# {SPDX[0]}
# {SPDX[1]}
"""What this tests, in one sentence."""

import pytest

pytestmark = pytest.mark.cpu_test


def test_{{name}}() -> None:
    pytest.fail("this test is not written yet")
'''


# What patches/pr/known.toml asks about it.
KNOWN = '\n[{fix}]\nharm = ""\nsymptom = ""\n'


def left(message: str) -> bool:
    """Whether a line of the message still is the template's."""
    return any(line.startswith(LEFT) for line in message.splitlines())
