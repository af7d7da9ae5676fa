"""Errors that a user can cause, told apart from defects of the program."""

import difflib
import sys
from collections.abc import Callable, Iterable
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


def nearest(word: str, valid: Iterable[str], most: int = 12) -> str:
    """ "; did you mean 'x'?" for the closest valid name, else "; valid: a, b, c"; empty if there is none."""
    names = sorted(map(str, valid))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if not names:
        return ""
    return "; valid: " + ", ".join(names[:most]) + (", ..." if len(names) > most else "")
