"""What a user can cause, told apart from what is a defect of the program."""

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """A configuration or an input that a user can mend.

    The message is one line: the key (or the file and its row), what was expected, and what to do. The command
    line prints it without a traceback and exits with 2.
    """


def run_command(name: str, main: Callable[[], int]) -> NoReturn:
    """End the process with a command's exit code; with 2 and one line where a user can mend what is wrong."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
