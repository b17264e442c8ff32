"""What an error owes its reader: the names of what is at fault."""

from __future__ import annotations

import pytest

# Any of these may stop a load; whether the user is helped is for the message to show.
REFUSALS = (ValueError, RuntimeError, AssertionError, KeyError, IndexError, TypeError, NotImplementedError)


def refuses() -> pytest.RaisesExc:
    """Expect an error of any of the kinds with which loading may stop."""
    return pytest.raises(REFUSALS)


def assert_named(error: BaseException, *wanted: str | tuple[str, ...]) -> None:
    """Every wanted word is in the message; of a tuple, any one."""
    message = str(error)
    for words in wanted:
        words = (words,) if isinstance(words, str) else words
        assert any(word in message for word in words), f"the error does not name {' or '.join(words)}: {message!r}"
