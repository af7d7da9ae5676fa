"""The nearest valid name, for one-line errors."""

import difflib
from collections.abc import Iterable


def nearest(word: str, valid: Iterable[str], most: int = 12) -> str:
    """ "; did you mean 'x'?" for the closest valid name, else "; valid: a, b, c"; empty if there is none."""
    names = sorted(map(str, valid))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if not names:
        return ""
    return "; valid: " + ", ".join(names[:most]) + (", ..." if len(names) > most else "")
