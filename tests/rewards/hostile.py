"""Strings that are meant to break whatever reads them."""

import random


def hostile(count: int, seed: int = 0) -> list[str]:
    """Random strings of what answers are made of, and the usual attacks."""
    draw = random.Random(seed)
    pieces = [
        *("\\boxed{", "\\frac{", "}", "{", "^", "_", "$", "\\(", "\\)", "\\[", "\\sqrt", "9" * 30, "10", "2", "!", "("),
        *(
            ")",
            "[",
            "]",
            ",",
            ".",
            " ",
            "\n",
            "x",
            "=",
            "answer is ",
            "####",
            "%",
            "\\infty",
            "\\cup",
            "1e999",
            "-",
            "/",
        ),
        *(
            "\\text{",
            "π",
            "²",
            "−",
            "\u202e",
            "\x00",
            "\U0001d7d8",
            "\ud800",
            "\\begin{pmatrix}",
            "&",
            "\\\\",
            "\\int",
            "**",
        ),
    ]
    attacks = [
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{10**10**10}",
        "\\boxed{99999999!}",
        "\\boxed{((9!)!)!}",
        "\\boxed{2^{99999999999}}",
        "\\boxed{1e999999999}",
        "\\boxed{" * 20_000,
        "{" * 100_000,
        "\\boxed{" + "{" * 200 + "}" * 200 + "}",
        "\\boxed{" + "\\frac{1}{" * 60 + "1" + "}" * 60 + "}",
        "\\boxed{" + "\\sqrt{" * 50 + "2" + "}" * 51,
        "\\boxed{" + "+".join(f"x^{i}" for i in range(90)) + "}",
        "\\boxed{(x+y+z+w)^{400}}",
        "\\boxed{\\int \\sin(\\sin(\\sin(x^x))) dx}",
        "\\boxed{\\sum_{n=1}^{10^9} \\frac{1}{n}}",
        "9" * 100_000,
        "1," * 50_000,
        "1/" * 50_000,
        "a" * 100_000,
        "$" * 100_000,
        "\\(" * 50_000,
        "answer is " * 10_000,
        "#### " * 20_000,
        "```python\n" * 10_000,
        "-" * 100_000,
        " " * 100_000 + "\\boxed{",
        "\\boxed{" + "(" * 400 + ")" * 400 + "}",
        "\\boxed{0^{0^{0}}}",
        "\\boxed{\\frac{0}{0}}",
        "\\boxed{1/0}",
    ]
    random_ones = ["".join(draw.choices(pieces, k=draw.randrange(1, 40))) for _ in range(count - len(attacks))]
    return attacks + random_ones
