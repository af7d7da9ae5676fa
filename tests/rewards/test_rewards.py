import math
from fractions import Fraction

import pytest

from rlpost.errors import UserError
from rlpost.rewards.answers import final_answer, one_number
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.format import FormatReward
from rlpost.rewards.function import TrainingState
from rlpost.rewards.math import MathReward
from rlpost.rewards.number import NumberReward
from rlpost.rewards.reasoning_gym import ReasoningGymReward
from rlpost.types import Rollout
from tests.conftest import make_rollout


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7", "7"),
        ("it is -5", "-5"),
        ("7-3", "3"),
        ("1,000 apples", "1000"),
        ("1,234,567.5", "1234567.5"),
        ("costs $3.50.", "3.50"),
        ("x = .5", "0.5"),
        ("2, 3", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    found = final_answer(text, ["last"])
    value = None if found is None else one_number(found)
    assert (None if value is None else value.value) == (None if number is None else Fraction(number))


def test_number_reward() -> None:
    reward = NumberReward()
    assert reward(completions=["it is 7.0", "8", "no idea", "x"], answers=["7", "7", "7", None]) == [1, 0, 0, None]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        ("the result is 18", "18", 1.0),
        ("no result", "18", 0.0),
    ],
)
def test_math_reward(completion: str, answer: str, expected: float) -> None:
    assert MathReward()(completions=[completion], answers=[answer]) == [expected]


def test_math_reward_skips_what_has_no_gold() -> None:
    assert MathReward()(completions=["1"], answers=[None]) == [None]


def test_format_reward() -> None:
    reward = FormatReward(r"<think>.*</think>.+", whole=True)
    assert reward(completions=["<think>a\nb</think> 3", "x <think></think> 3", "3"]) == [1, 0, 0]
    assert FormatReward(r"\d")(completions=["a1", "a"]) == [1, 0]
    with pytest.raises(UserError, match="not a regular expression"):
        FormatReward("(")


def test_reasoning_gym_reward_scores_its_own_entries() -> None:
    from rlpost.data.tasks import ReasoningGym

    example = ReasoningGym("chain_sum", size=3, held_out=1).load().train[0]
    reward = ReasoningGymReward()
    columns = {"dataset": ["chain_sum", "chain_sum", None], "entry": [example.columns["entry"]] * 2 + [None]}
    right, wrong, other = reward(completions=[f"Answer: {example.answer}", "Answer: no", "1"], **columns)
    assert right == 1.0
    assert wrong < 1.0
    assert other is None
    assert reward(completions=["1"]) == [None]


def score(reward: RewardSum, rollouts: list[Rollout]) -> None:
    reward.start(rollouts, TrainingState(1, 4))
    reward.finish()


def test_the_weighted_sum_of_what_applies() -> None:
    rollouts = [make_rollout(text="7", answer="7"), make_rollout(text="x7", answer=None)]
    reward = RewardSum({"number": NumberReward(), "format": FormatReward(r"^\d")}, {"number": 1.0, "format": 0.2})
    score(reward, rollouts)
    assert rollouts[0].rewards == {"number": 1.0, "format": 1.0}
    assert rollouts[0].reward == pytest.approx(1.2)
    assert math.isnan(rollouts[1].rewards["number"])
    assert rollouts[1].reward == 0.0


def test_where_nothing_applies_the_reward_is_nan() -> None:
    rollout = make_rollout(text="7", answer=None)
    score(RewardSum({"number": NumberReward()}, {"number": 1.0}), [rollout])
    assert math.isnan(rollout.reward)


def test_functions_get_prompts_answers_prefixes_and_columns() -> None:
    seen: dict[str, object] = {}

    def spy(**arguments: list[object]) -> list[float]:
        seen.update(arguments)
        return [0.0, 0.0]

    first = make_rollout(text="b", answer="1", columns={"level": 3})
    object.__setattr__(first.prompt, "completion_prefix", "a")
    score(RewardSum({"spy": spy}, {"spy": 1.0}), [first, make_rollout(text="c")])
    assert seen == {
        "prompts": ["?", "?"],
        "completions": ["ab", "c"],
        "answers": ["1", None],
        "level": [3, None],
        "images": [[], []],
        "messages": [[{"role": "user", "content": "?"}]] * 2,
        "prompt_ids": [[5, 6, 7]] * 2,
        "completion_ids": [[8, 9]] * 2,
        "finish_reasons": ["stop", "stop"],
        "episodes": [[], []],
        "environment_rewards": [None, None],
        "step": 1,
        "progress": 0.25,
    }
