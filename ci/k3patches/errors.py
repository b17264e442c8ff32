"""The one error class whose message is meant for a user."""

from __future__ import annotations

import click


class UserError(click.ClickException):
    """What the user can mend: one sentence that names the thing and the way out.

    The command line prints it without a traceback and exits with 1.
    """
