"""Errors that a user can cause, told apart from defects of the program."""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
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


def require(packages: Mapping[str, str], needed_by: str) -> None:
    """Check that packages which only a feature needs are installed. Nothing is imported.

    Args:
        packages: by the name they are imported by, the extra of pyproject.toml that brings each; "a|b" where either does.
        needed_by: the feature, as the user asked for it: key=value.

    Raises: UserError that names the first missing package and its extra.
    """
    for package, extras in packages.items():
        if importlib.util.find_spec(package) is None:
            choices = " or ".join(f"'rlpost[{extra}]'" for extra in extras.split("|"))
            raise UserError(f"{needed_by} needs the package {package}: pip install {choices}")


def nearest(word: str, valid: Iterable[str], most: int = 12) -> str:
    """ "; did you mean 'x'?" for the closest valid name, else "; valid: a, b, c"; empty if there is none."""
    names = sorted(map(str, valid))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if not names:
        return ""
    return "; valid: " + ", ".join(names[:most]) + (", ..." if len(names) > most else "")
