"""A completion's final answer: found once, written plainly, read as a quantity. No algebra, and linear in the text.

docs/answers.md says in a table what counts as equal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from rlpost.errors import UserError

Source = Literal["boxed", "hash", "phrase", "last", "all"]
Percent = Literal["drop", "hundredth"]
DEFAULT_SOURCES: tuple[Source, ...] = ("boxed", "hash", "phrase", "last")

LONGEST = 500  # characters of an answer; what is longer is not one
SHORTEST_ECHO = 12  # characters of a question that are taken for a repetition of it

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?!\d))?"
NUMBER = re.compile(rf"[-+]?{_NUMBER}")
_PHRASE = re.compile(r"answers?\W{0,4}\s*(?:is|are|was|:|=)\s*:?[ \t]*", re.IGNORECASE)
_HASH = re.compile(r"^[ \t]*####[ \t]*(.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?:\s|$)|\n")

# What stands where a unit does: after a number and a space any word, right behind it one of these.
_SHORT_UNITS = [
    "mm",
    "cm",
    "dm",
    "km",
    "m",
    "mg",
    "kg",
    "g",
    "ml",
    "cl",
    "l",
    "L",
    "ft",
    "in",
    "yd",
    "mi",
    "lb",
    "lbs",
    "oz",
    "s",
    "ms",
    "sec",
    "min",
    "h",
    "hr",
    "hrs",
    "mph",
    "kph",
    "km/h",
    "m/s",
    "kB",
    "MB",
    "GB",
    "TB",
    "am",
    "pm",
    "a.m.",
    "p.m.",
    "K",
    "C",
    "F",
    "W",
    "kW",
    "V",
    "A",
    "Hz",
]
_CURRENCY = re.compile(r"^([-+]?)\s*(?:US|C|A)?[$€£¥₹]\s*")
_PERCENT = re.compile(r"\s*(?:%|percent|per cent)$", re.IGNORECASE)
_UNIT = re.compile(
    rf"^(.*?[\d}}])(?:\s+([^\W\d_][^\W\d_.²³]*(?:[ /·-]+[^\W\d_][^\W\d_.²³]*){{0,3}}|{'|'.join(map(re.escape, _SHORT_UNITS))})"
    rf"|({'|'.join(map(re.escape, _SHORT_UNITS))}))\s*(\^?\{{?[23]\}}?|[²³])?\.?$"
)


@dataclass(frozen=True)
class Quantity:
    """A number with what stands beside it."""

    value: Fraction
    unit: str = ""  # singular, lower case
    is_percent: bool = False


@dataclass(frozen=True)
class AnswerReward:
    """The base of rewards of a final answer; how it is compared with the gold one is their own.

    Attributes:
        sources: where a final answer is looked for, in this order (`final_answer`).
        percent: drop: 25% is 25; hundredth: 25% is 0.25.
        precision: decimals to which numbers are compared.

    Raises: UserError for a source that is not known.
    """

    sources: Sequence[Source] = DEFAULT_SOURCES
    percent: Percent = "drop"
    precision: int = 6

    def __post_init__(self) -> None:
        for source in self.sources:
            if source not in get_args(Source):
                raise UserError(f"reward: sources: {source!r} is none of {', '.join(get_args(Source))}")

    def __call__(
        self,
        *,
        completions: list[str],
        answers: list[str | None],
        messages: list[list[dict[str, Any]]] | None = None,
        **_: Any,
    ) -> list[float | None]:
        questions = [m[-1]["content"] if m else "" for m in messages or [[]] * len(completions)]
        return [self._score(*row) for row in zip(completions, answers, questions, strict=True)]

    def _score(self, completion: str, answer: str | None, question: str) -> float | None:
        raise NotImplementedError


def final_answer(completion: str, sources: Sequence[Source], question: str = "") -> str | None:
    """The completion's final answer, by the first source that finds one; None if none does.

    Args:
        sources: boxed: the last \\boxed{...}; hash: the last line "#### ..."; phrase: what follows the last "answer is" or
            "answer:" in its sentence; last: the last formula or number; all: all of it.
        question: repeating it answers nothing: a verbatim copy is left out first.
    """
    if len(question) >= SHORTEST_ECHO:
        completion = completion.replace(question, " ")
    for source in sources:
        found = _FINDERS[source](completion)
        if found is not None and found.strip():
            return found.strip() if len(found) <= LONGEST else None
    return None


def _boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed")[: LONGEST + 2].lstrip()
    if not rest.startswith("{"):
        return rest.split(maxsplit=1)[0].rstrip("$.,") if rest else None
    depth, place = 0, 0
    while place < len(rest):
        character = rest[place]
        if character == "\\":
            place += 1
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place]
        place += 1
    return None  # cut off, or no answer


def _hash(text: str) -> str | None:
    found = _HASH.findall(text)
    return found[-1] if found else None


def _phrase(text: str) -> str | None:
    end = None
    for match in _PHRASE.finditer(text):
        end = match.end()
    if end is None:
        return None
    rest = text[end : end + 2 * LONGEST].lstrip(" \t*_`\n")
    for opening, closing in (("$$", r"\$\$"), ("\\(", r"\\\)"), ("\\[", r"\\\]"), ("$", r"(?<!\\)\$")):
        if rest.startswith(opening) and (end := re.compile(closing).search(rest, len(opening))):
            inner = rest[len(opening) : end.start()]
            if opening != "$" or not (inner[-1:].isspace() or "\n" in inner):  # "$5 and $6" holds no formula
                return inner
    end_of_sentence = _SENTENCE_END.search(rest)
    return (rest[: end_of_sentence.start()] if end_of_sentence else rest).strip(" \t*_`")


def _last(text: str) -> str | None:
    number = None
    for match in NUMBER.finditer(text):
        number = match
    candidates = [] if number is None else [(number.end(), _number_at(text, number))]
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        end = text.rfind(closing)
        start = text.rfind(opening, 0, end) if end > 0 else -1
        inner = text[start + len(opening) : end] if start >= 0 else ""
        if inner and len(inner) <= LONGEST and inner[0] != " " and inner[-1] != " ":
            candidates.append((end, inner))
    return max(candidates)[1] if candidates else None


def _number_at(text: str, number: re.Match[str]) -> str:
    """The number with its fraction or percent sign. A sign counts unless a digit stands before it: "7-3" ends in 3."""
    start, found = number.start(), number.group()
    before = text[max(0, start - 40) : start]
    if found[0] in "+-" and before[-1:].isdigit():
        return found[1:] + _percent_after(text, number.end())
    fraction = re.search(rf"({NUMBER.pattern})\s?/\s?$", before)
    if fraction and found[0].isdigit():
        whole = fraction.group(1)
        at = fraction.start()
        if whole[0] in "+-" and at > 0 and before[at - 1].isdigit():
            whole = whole[1:]
        return f"{whole}/{found}" + _percent_after(text, number.end())
    return found + _percent_after(text, number.end())


def _percent_after(text: str, place: int) -> str:
    return "%" if re.match(r"\s?\\?%", text[place : place + 3]) else ""


def _all(text: str) -> str:
    return text


_FINDERS = {"boxed": _boxed, "hash": _hash, "phrase": _phrase, "last": _last, "all": _all}


_REMOVED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr|Bigl?|Bigr|limits|quad|qquad|mathstrut)(?![a-zA-Z])"
    r"|(?<!\\)\\[!;:,> ]|\^\{?\\circ\}?|\^\{?\\degree\}?|\\degree|°|\\\$|(?<!\\)\$"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\!,\\!|,\\!\s*|\\,|\\ )(?=\d{3}(?!\d))")
_POWERS = str.maketrans("²³", "23")
_CHARACTERS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "\u00a0": " ", "\u202f": " ", "，": ","})


def plain(answer: str) -> str:
    """Without what changes an answer's look and not its meaning: delimiters, spacing, fonts, degree signs, last full stop."""
    text = answer.translate(_CHARACTERS)
    text = _THOUSANDS.sub(",", text)
    text = re.sub(r"\\(?:US)?\$", "$", text) if text.lstrip("-+ ").startswith("\\$") else text
    currency = _CURRENCY.match(text.strip()) if not text.strip().endswith("$") else None
    kept = f"{currency.group(1)}$" if currency else ""
    text = text.strip()[currency.end() :] if currency else text
    text = _REMOVED.sub(" ", text).replace("\\%", "%").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _WRAPPED.sub(r" \1 ", text)
    text = " ".join(text.split()).strip(" *_`\"'").rstrip(".,;: ")
    return kept + text


def quantity(text: str) -> Quantity | None:
    """A plain text that is one number, perhaps with a currency, a percent sign or a unit; None for anything else."""
    if len(text) > LONGEST:
        return None
    body, unit = text, ""
    if currency := _CURRENCY.match(body):
        body, unit = currency.group(1) + body[currency.end() :], ""
    is_percent = _PERCENT.search(body) is not None
    body = _PERCENT.sub("", body)
    value = _value(body)
    if value is None and (match := _UNIT.match(body)):
        value = _value(match.group(1).strip())
        unit = (match.group(2) or match.group(3)) + (match.group(4) or "").strip("^{}").translate(_POWERS)
    return None if value is None else Quantity(value, _singular(unit), is_percent)


_FORMS = [
    re.compile(rf"(?P<sign>[-+]?)\s*(?P<number>{_NUMBER})"),
    re.compile(
        r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d{1,30})\s*)?\\frac\s*"
        r"(?:\{\s*(?P<inner>-?)(?P<top>\d{1,30})\s*\}|(?P<top1>\d))\s*(?:\{\s*(?P<bottom>\d{1,30})\s*\}|(?P<bottom1>\d))"
    ),
    re.compile(r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d{1,30})\s+)?(?P<top>\d{1,30})\s*/\s*(?P<bottom>\d{1,30})"),
    re.compile(rf"(?P<sign>[-+]?)\s*(?P<top>{_NUMBER})\s*/\s*(?P<bottom>{_NUMBER})"),
    re.compile(
        rf"(?P<sign>[-+]?)\s*(?P<number>{_DIGITS})\s*(?:\\times|\\cdot|[*xX])\s*10\s*\^\s*\{{?(?P<exponent>-?\d{{1,3}})\}}?"
    ),
]


def _value(text: str) -> Fraction | None:
    for form in _FORMS:
        if match := form.fullmatch(text):
            part = {name: value for name, value in match.groupdict().items() if value}
            sign = -1 if part.get("sign") == "-" else 1
            if "number" in part:
                value = _fraction(part["number"]) * Fraction(10) ** int(part.get("exponent", 0))
            else:
                top, bottom = part.get("top") or part["top1"], part.get("bottom") or part["bottom1"]
                if _fraction(bottom) == 0:
                    return None
                value = Fraction(part.get("whole", 0)) + _fraction(top) / _fraction(bottom)
                sign *= -1 if part.get("inner") else 1
            return sign * value
    return None


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def _singular(unit: str) -> str:
    words = unit.strip().split()
    return " ".join(word[:-1] if len(word) > 2 and word.endswith("s") else word for word in words).lower()


def one_number(answer: str) -> Quantity | None:
    """The number that an answer gives: all of it, or the first in words around it; None if it offers several.

    Of "3 + 4 = 7" it is what stands behind the last equals sign.
    """
    text = plain(answer)
    if (whole := quantity(text)) is not None:
        return whole
    behind = text.rsplit("=", 1)[-1].strip()
    if (whole := quantity(behind)) is not None:
        return whole
    first, *others = [*NUMBER.finditer(behind), None]
    if first is None:
        return None
    if others[0] is not None and re.fullmatch(r"\s*(?:[,;/&|]|or|and|\s)*\s*", behind[first.end() : others[0].start()]):
        return None
    return quantity(_number_at(behind, first))


def equal_quantities(a: Quantity, b: Quantity, percent: Percent, precision: int) -> bool:
    """Within 10^-precision and a thousandth of the first, and of one unit where both have one.

    Args: percent: drop: 25% is 25; hundredth: 25% is 0.25.
    """
    if a.unit and b.unit and a.unit != b.unit:
        return False
    scale = {True: Fraction(1, 100) if percent == "hundredth" else Fraction(1), False: Fraction(1)}
    ours, theirs = a.value * scale[a.is_percent], b.value * scale[b.is_percent]
    return abs(ours - theirs) <= min(Fraction(1, 10**precision), abs(ours) / 1000)
