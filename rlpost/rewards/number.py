"""The number that a completion ends up with, compared with the gold number. No algebra: `math` has that."""

from dataclasses import dataclass

from rlpost.rewards.answers import AnswerReward, equal_quantities, final_answer, one_number


@dataclass(frozen=True)
class NumberReward(AnswerReward):
    """1 where the completion's number equals the gold answer's, else 0; None where the gold is no number."""

    def _score(self, completion: str, answer: str | None, question: str) -> float | None:
        gold = None if answer is None else one_number(answer)
        if gold is None:
            return None
        found = final_answer(completion, self.sources, question)
        number = None if found is None else one_number(found)
        return float(number is not None and equal_quantities(gold, number, self.percent, self.precision))
