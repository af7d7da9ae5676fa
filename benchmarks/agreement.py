"""How often the checkers agree with known verdicts, and every case in which they do not: python -m benchmarks.agreement DATA

DATA holds gsm8k/{train,test}.jsonl, whose solutions end in "#### answer", and math/{math,amc,aime}.jsonl with an answer field.
Verdicts are known without a checker: a solution is right for its own problem, and wrong for another one with another number;
a rewriting of an answer that keeps its value is right, one that changes it is wrong.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlpost.rewards.math import MathReward
from rlpost.rewards.number import NumberReward


class Case(NamedTuple):
    kind: str
    completion: str
    gold: str
    verdict: float


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def gsm8k(data: Path) -> Iterator[Case]:
    rows = _rows(data / "gsm8k/test.jsonl") + _rows(data / "gsm8k/train.jsonl")
    golds = [row["answer"].rsplit("####", 1)[1].strip() for row in rows]
    values = [int(gold.replace(",", "")) for gold in golds]
    for i, row in enumerate(rows):
        other = (i + 1) % len(rows)
        solution, marked = row["answer"], row["answer"].rsplit("####", 1)[0]
        same = float(values[i] == values[other])
        yield Case("gsm8k: a solution, its own answer", solution, golds[i], 1.0)
        yield Case("gsm8k: a solution, the next problem's answer", solution, golds[other], same)
        yield Case("gsm8k: the answer in a sentence", f"{marked}The answer is {golds[i]} dollars.", golds[i], 1.0)
        yield Case("gsm8k: the answer in a box", f"{marked}\\boxed{{{values[i]}}}", golds[i], 1.0)
        yield Case("gsm8k: a number one off", f"{marked}#### {values[i] + 1}", golds[i], 0.0)


def _is_scalar(answer: str) -> bool:
    return re.fullmatch(r"[-0-9a-z^{}\\ +.]+", answer) is not None and not re.search("text|begin", answer)


# Rewritings that keep an answer's value, and ones that change it; None where they do not apply.
Rewriting = Callable[[str], str | None]
KEEP: dict[str, Rewriting] = {
    "as it is": lambda a: a,
    "large fractions": lambda a: a.replace("\\frac", "\\dfrac") if "\\frac" in a else None,
    "without \\left and \\right": lambda a: re.sub(r"\\(left|right)", "", a) if "\\left" in a else None,
    "more space": lambda a: re.sub(r"(?<=[-+=,])", " ", a) if "\\text" not in a else None,
    "a full stop": lambda a: a + ".",
    "as an equation": lambda a: f"k = {a}" if "=" not in a and "\\text" not in a and "," not in a else None,
    "in dollar signs": lambda a: f"${a}$" if "$" not in a else None,
    "with a plus": lambda a: f"{a} + 0" if _is_scalar(a) else None,
}
CHANGE: dict[str, Rewriting] = {
    "one off": lambda a: f"{a} + 1" if _is_scalar(a) else None,
    "another last digit": lambda a: (
        re.sub(r"(\d)(?=\D*$)", lambda m: str((int(m[1]) + 1) % 10), a) if re.search(r"\d", a) else None
    ),
    "with another answer": lambda a: f"{a}, 98765",
    "negative": lambda a: f"-{a}" if re.fullmatch(r"\d*[1-9]\d*(\.\d+)?", a) else None,
    "without its end": lambda a: a[: len(a) // 2] if re.fullmatch(r"\d{4,}", a) else None,
}


def mathematics(data: Path) -> Iterator[Case]:
    golds = [str(row["answer"]) for name in ("math", "amc", "aime") for row in _rows(data / f"math/{name}.jsonl")]
    for gold in golds:
        for verdict, rewritings in ((1.0, KEEP), (0.0, CHANGE)):
            for name, rewrite in rewritings.items():
                if (found := rewrite(gold)) is not None:
                    yield Case(f"MATH: {name}", f"Hence \\boxed{{{found}}}.", gold, verdict)
        for text in ("The final answer is ${}$.", "It follows that the answer is: {}", "#### {}"):
            if "\n" not in gold:
                yield Case(f"MATH: {text.format('...')}", text.format(gold), gold, 1.0)


def main(data: str, shown: int = 20) -> None:
    for source, rewards in ((gsm8k, [NumberReward(), MathReward()]), (mathematics, [MathReward()])):
        cases = list(source(Path(data)))
        for reward in rewards:
            values = [reward(completions=[c.completion], answers=[c.gold])[0] for c in cases]
            print(
                f"\n{type(reward).__name__}: {sum(v == c.verdict for v, c in zip(values, cases, strict=True))} of {len(cases)}"
            )
            for kind in dict.fromkeys(case.kind for case in cases):
                own = [(v, c) for v, c in zip(values, cases, strict=True) if c.kind == kind]
                wrong = [(v, c) for v, c in own if v != c.verdict]
                print(f"  {len(own) - len(wrong):>6} of {len(own):>6}  {kind}")
                for value, case in wrong[:shown]:
                    print(
                        f"          gold {case.gold!r}, answer {case.completion[-90:]!r}: {value}, not {case.verdict}"
                    )


if __name__ == "__main__":
    main(sys.argv[1])
