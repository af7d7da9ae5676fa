"""What counts as equal, pair by pair, right and wrong; where an answer is found; and strings meant to break things."""

from fractions import Fraction

import pytest

from rlpost.errors import UserError
from rlpost.rewards.answers import final_answer, one_number, plain, quantity
from rlpost.rewards.math import MathReward
from rlpost.rewards.number import NumberReward
from tests.rewards.hostile import hostile

EQUAL = [
    # numbers
    *[("18", "18"), ("18", "18.0"), ("18", "18.00"), ("18", "018"), ("18", "+18"), ("-3", "-3"), ("-3", "−3")],
    *[("0.5", ".5"), ("142.0", "142"), ("1000", "1,000"), ("9500", "9{,}500"), ("1234567", "1,234,567")],
    *[("1,000", "1000"), ("10,080", "10080"), ("10,\\!080", "10080"), ("1\\,000", "1000"), ("12\\,345.5", "12345.5")],
    *[("0.333333", "1/3"), ("1/3", "0.33333333"), ("1/2", "0.5"), ("\\frac{1}{2}", "1/2"), ("\\frac12", "0.5")],
    *[("\\dfrac{3}{4}", "\\frac{3}{4}"), ("\\tfrac34", "0.75"), ("2/4", "1/2"), ("-\\frac{1}{2}", "-0.5")],
    *[("\\frac{-1}{2}", "-1/2"), ("3\\frac{1}{2}", "3.5"), ("3 1/2", "7/2"), ("1e3", "1000"), ("2.5e-3", "0.0025")],
    *[("1.5 \\times 10^{3}", "1500"), ("6 \\cdot 10^4", "60000"), ("10^3", "1000"), ("2^{10}", "1024")],
    # units, currency, degrees, percent
    *[("18", "$18"), ("18", "\\$18"), ("$18.00", "18"), ("18", "18 dollars"), ("18 dollars", "18"), ("18", "18 eggs")],
    *[
        ("5", "5 cm"),
        ("5", "5cm"),
        ("5\\text{ cm}", "5 cm"),
        ("5 \\mathrm{cm}", "5"),
        ("5 cm^2", "5"),
        ("5 cm^2", "5 cm²"),
    ],
    *[("10 meters", "10 meter"), ("90", "90^\\circ"), ("90^{\\circ}", "90°"), ("90", "90 degrees"), ("-$5", "-5")],
    *[("25", "25%"), ("25\\%", "25"), ("25\\%", "25%"), ("25 percent", "25%"), ("€20", "20"), ("60 mph", "60 mph")],
    *[("1000", "1,000 dollars"), ("5", "5 miles per hour"), ("12", "12 square feet")],
    # other bases, small numbers
    *[("52_8", "52_{8}"), ("52_8", "k = 52_8"), ("4210_{5}", "4210_5")],
    *[(".0000672", "6.72 \\times 10^{-5}"), (".0000672", "0.00006720")],
    *[("1/12", "0.083333"), ("11,\\! 111,\\! 100", "11111100")],
    # algebra
    *[("p - q", "p-q"), ("p - q", "-q + p"), ("2x+1", "1+2x"), ("(x+1)^2", "x^2+2x+1"), ("x(x+1)", "x^2 + x")],
    *[("\\sqrt{8}", "2\\sqrt{2}"), ("\\sqrt2", "\\sqrt{2}"), ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}")],
    *[
        ("\\frac{\\pi}{2}", "\\pi/2"),
        ("\\pi", "\\pi"),
        ("2\\pi", "6.283185307"),
        ("e^{2}", "e^2"),
        ("\\log 2", "\\log(2)"),
    ],
    *[("3+4i", "4i+3"), ("x^{2}", "x^2"), ("\\frac{x}{2}", "x/2"), ("2 \\cdot 3", "6"), ("3!", "6"), ("|{-3}|", "3")],
    # equations and assignments
    *[("5", "x = 5"), ("x=5", "5"), ("x = 5", "x=5"), ("y=2x+3", "y = 3+2x"), ("2x+3", "y = 2x+3"), ("7", "3 + 4 = 7")],
    *[("f(x) = x^2", "x^2"), ("x+y=1", "y + x = 1"), ("x \\in [0,1]", "[0,1]")],
    # tuples, intervals, sets, matrices
    *[("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("(1,2)", "(1, 2)"), ("(1,2,3)", "(1,2,3)")],
    *[("(0.5,2)", "(\\frac12, 2)"), ("[0,1)", "[0, 1)"), ("(-\\infty, 3]", "(-\\infty,3]")],
    *[("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty) \\cup (-\\infty, 2)"), ("\\{1,2,3\\}", "\\{3,2,1\\}")],
    *[("1,2", "2, 1"), ("1, 2", "1 or 2"), ("-1, 1", "\\{1,-1\\}"), ("3, 5, 7", "7, 5 and 3")],
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}",
    ),
    ("\\begin{pmatrix} 1/2 \\\\ 3 \\end{pmatrix}", "\\begin{pmatrix} 0.5 \\\\ 3 \\end{pmatrix}"),
    # texts and choices
    *[("\\text{Evelyn}", "Evelyn"), ("Evelyn", "evelyn"), ("\\text{even}", "Even."), ("Monday", "\\textbf{Monday}")],
    *[("A", "(A)"), ("\\text{(B)}", "B"), ("(C)", "c"), ("C", "option C"), ("yes", "Yes"), ("New York", "new york")],
]

DIFFERENT = [
    *[("18", "19"), ("18", "-18"), ("18", "1.8"), ("18", "180"), ("18", "8"), ("18", "17.99"), ("-3", "3")],
    *[
        ("1000", "1,00"),
        ("1000", "1.000"),
        ("1/3", "0.33"),
        ("1/3", "0.3"),
        ("1/2", "2/1"),
        ("1/2", "12"),
        ("3.5", "3 1/3"),
    ],
    *[("0.1", "0.10001"), ("1e3", "1e4"), ("2^{10}", "2^{11}"), ("1000000", "1000001"), ("3\\frac{1}{2}", "3/2")],
    *[("52_8", "52_9"), ("52_8", "53_8"), ("52_8", "52"), ("52_8", "42"), (".0000672", ".0000673"), ("0", "0.000001")],
    *[("5 cm", "5 m"), ("10 dollars", "10 cents"), ("5 cm^2", "5 cm"), ("25", "0.25"), ("0.25", "25%"), ("25", "2.5%")],
    *[
        ("p - q", "q - p"),
        ("2x+1", "2x-1"),
        ("(x+1)^2", "x^2+1"),
        ("\\sqrt{8}", "4"),
        ("\\pi", "3.14"),
        ("\\pi", "22/7"),
    ],
    *[
        ("x", "y"),
        ("x", "5"),
        ("2x", "2"),
        ("5", "5x"),
        ("e^2", "e^3"),
        ("3+4i", "3-4i"),
        ("x^2", "x^3"),
        ("\\sqrt{2}", "2"),
    ],
    *[("5", "x = 6"), ("x=5", "x=6"), ("y=2x+3", "y=2x+4"), ("5", "x + 1 = 6 = y"), ("7", "3 + 4 = 8")],
    *[
        ("(1,2)", "(2,1)"),
        ("(1,2)", "(1,3)"),
        ("(1,2)", "(1,2,3)"),
        ("[0,1)", "[0,1]"),
        ("[0,1)", "(0,1)"),
        ("(1,2)", "1"),
    ],
    *[("(0,1]", "[0,1)"), ("(-\\infty,3]", "(-\\infty,3)"), ("(0,1)\\cup(2,3)", "(0,1)"), ("\\{1,2\\}", "\\{1,2,3\\}")],
    *[
        ("1,2", "1"),
        ("1", "1,2"),
        ("3", "1, 2, 3, 4"),
        ("3", "3 or 4"),
        ("18", "18, 20"),
        ("18", "16, 17, 18"),
        ("1,2", "1,3"),
    ],
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}",
    ),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
    *[
        ("\\text{Evelyn}", "nyleve"),
        ("Evelyn", "Eve"),
        ("even", "odd"),
        ("Monday", "Tuesday"),
        ("A", "B"),
        ("(A)", "A or B"),
    ],
    *[("yes", "no"), ("yes", "yes and no"), ("5", "five apples"), ("18", ""), ("18", "no idea"), ("A", "apple")],
]


def test_the_table_is_large_enough() -> None:
    assert len(set(EQUAL)) + len(set(DIFFERENT)) >= 150


def score(gold: str, found: str, **settings: object) -> float | None:
    (value,) = MathReward(**settings)(completions=[f"So it is \\boxed{{{found}}}."], answers=[gold])
    return value


@pytest.mark.parametrize(("gold", "found"), EQUAL)
def test_equal(gold: str, found: str) -> None:
    assert score(gold, found) == 1.0


@pytest.mark.parametrize(("gold", "found"), DIFFERENT)
def test_different(gold: str, found: str) -> None:
    assert score(gold, found) == 0.0


@pytest.mark.parametrize(("gold", "found"), EQUAL)
def test_every_gold_equals_itself(gold: str, found: str) -> None:
    assert score(gold, gold) == 1.0
    assert score(found, found) == 1.0


@pytest.mark.parametrize(
    "gold", [None, "", "\\frac{1}{", "{", "$", "\\begin{pmatrix}", "9" * 600, "\\boxed", "?", "..."]
)
def test_a_gold_that_cannot_be_read_rewards_nothing(gold: str | None) -> None:
    assert MathReward()(completions=["\\boxed{}", f"\\boxed{{{gold}}}"], answers=[gold, gold]) == [None, None]


def test_percent_is_a_policy() -> None:
    for reward in (MathReward, NumberReward):
        drop, hundredth = reward(percent="drop"), reward(percent="hundredth")
        asked = {"completions": [r"\boxed{25\%}"] * 3, "answers": ["25", "0.25", "25%"]}
        assert drop(**asked) == [1, 0, 1]
        assert hundredth(**asked) == [0, 1, 1]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"First \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed 7", "7"),
        (r"$\fbox{8}$", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 7\nno:\n#### 8 eggs\n", "8 eggs"),
        ("The answer is 12. It was easy, 3 steps.", "12"),
        ("The answer is: **12**", "12"),
        ("The final answer is $\\frac{3}{4}$. Done 5", r"\frac{3}{4}"),
        ("Answer: 3.5", "3.5"),
        ("The final answer is $\\$36$.", "\\$36"),
        (r"The answer is 11,\! 111", r"11,\! 111"),
        ("answer: 3.5 dollars. Next: 4", "3.5 dollars"),
        ("The answer is\n\n42\n", "42"),
        ("The answer is $18 per day and $5 more.", "$18 per day and $5 more"),
        ("so we get 3 and then 4 apples", "4"),
        ("that is 3/4 of it", "3/4"),
        ("it rose by 12 % then", "12%"),
        ("so 5-3", "3"),
        ("so it is -3", "-3"),
        ("we get $x^2 + 1$", "x^2 + 1"),
        (r"we get \(x^2 + 1\) in 2 steps", "2"),
        ("nothing here", None),
        ("", None),
        (r"\boxed{12", "12"),  # cut off: the last number, as in any text
    ],
)
def test_where_an_answer_is_found(completion: str, answer: str | None) -> None:
    assert final_answer(completion, ["boxed", "hash", "phrase", "last"]) == answer


def test_sources_are_a_choice() -> None:
    text = "The answer is 3.\n#### 4\n\\boxed{5} 6"
    for source, answer in (("phrase", "3"), ("hash", "4"), ("boxed", "5"), ("last", "6"), ("all", text)):
        assert final_answer(text, [source]) == answer
    assert final_answer("6", ["boxed", "hash"]) is None
    with pytest.raises(UserError, match="sources: 'bxed' is none of boxed, hash, phrase, last, all"):
        MathReward(sources=["bxed"])


@pytest.mark.parametrize("reward", [MathReward(), NumberReward()])
def test_neither_an_echo_nor_a_list_is_rewarded(reward: MathReward | NumberReward) -> None:
    question = "Tom has 18 eggs and 3 boxes of 18. How many eggs is the answer: 18?"
    messages = [[{"role": "user", "content": question}]]
    for completion in (
        question,
        f"{question} {question}",
        "The answer is 16, 17, 18, 19 or 20.",
        "The answer is 18 or 20.",
        r"\boxed{16, 17, 18}",
        "#### 18, 19",
        "18 17",
    ):
        assert reward(completions=[completion], answers=["18"], messages=messages) == [0.0], completion
    assert reward(completions=[f"{question} It is 18."], answers=["18"], messages=messages) == [1.0]


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [("18", 18, ""), ("$1,200.50", Fraction("1200.5"), ""), ("5 km/h", 5, "km/h"), ("3 1/4", Fraction(13, 4), "")],
)
def test_quantities(text: str, value: Fraction | int, unit: str) -> None:
    found = quantity(plain(text))
    assert found is not None
    assert (found.value, found.unit) == (value, unit)


@pytest.mark.parametrize("text", ["", "x", "5x", "1/0", "\\frac{1}{0}", "1,2", "(1)", "1e9999", "1 2", "--3", "five"])
def test_what_is_no_quantity(text: str) -> None:
    assert quantity(plain(text)) is None


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("18", 18),
        ("18 dollars per day", 18),
        ("3 + 4 = 7", 7),
        ("about 18 eggs in 3 boxes", 18),
        ("1,000", 1000),
        ("18 or 20", None),
        ("1 2 3", None),
        ("none", None),
    ],
)
def test_one_number(answer: str, value: int | None) -> None:
    found = one_number(answer)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize("gold", ["18", "\\frac{\\pi}{2}"])
def test_hostile_strings_are_wrong_and_quick(gold: str) -> None:
    """No exception, no value but 0 and 1. How long they take is bounded by each reward's own limit."""
    strings = hostile(500)
    for reward in (NumberReward(), MathReward(seconds=1)):
        values = reward(completions=strings, answers=[gold] * len(strings))
        assert set(values) <= {0.0, 1.0}
