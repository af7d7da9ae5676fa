import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.schema import ScoringConfig
from rlpost.errors import UserError
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.function import RewardError, TrainingState
from rlpost.rewards.judge import JudgeReward
from tests.conftest import make_rollout
from tests.rewards.judge_server import judge_server


def verdicts(reward: JudgeReward, completions: list[str], **columns: Any) -> list[float]:
    count = len(completions)
    messages = [[{"role": "user", "content": "2 + 2?"}]] * count
    return asyncio.run(reward(completions=completions, answers=["4"] * count, messages=messages, **columns))


def yes_to_four(asked: str, number: int) -> tuple[int, str]:
    return 200, "Yes." if "Response:\n4\n" in asked else "I think not: no"


def test_the_judge_is_asked_about_each_completion() -> None:
    with judge_server(yes_to_four) as judge:
        assert verdicts(JudgeReward("m", judge.url, system="Be strict."), ["4", "5"]) == [1.0, 0.0]
    system, user = judge.asked[0]["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    assert "Question:\n2 + 2?\n" in user["content"]
    assert "Reference answer:\n4\n" in user["content"]
    assert (judge.asked[0]["model"], judge.asked[0]["temperature"]) == ("m", 0.0)


def test_a_score_out_of_ten_with_a_column() -> None:
    prompt = "Rate {completion} at level {level} from 0 to 10."
    with judge_server(lambda asked, number: (200, "First I thought 3. Score: 7")) as judge:
        reward = JudgeReward("m", judge.url, prompt=prompt, pattern=r"\d+", scale=10)
        assert verdicts(reward, ["{x}"], level=["easy"]) == [0.7]
    assert judge.asked[0]["messages"][-1]["content"] == "Rate {x} at level easy from 0 to 10."


def test_the_same_question_is_asked_once_over_runs_too(tmp_path: Path) -> None:
    with judge_server(yes_to_four) as judge:
        for _ in range(2):
            reward = JudgeReward("m", judge.url, cache=str(tmp_path / "kept" / "judge.sqlite"))
            assert verdicts(reward, ["4"]) == [1.0]
            assert verdicts(reward, ["4"]) == [1.0]
        assert len(judge.asked) == 1
        other = JudgeReward("m", judge.url, temperature=0.5, cache=str(tmp_path / "kept" / "judge.sqlite"))
        assert verdicts(other, ["4"]) == [1.0]
        assert len(judge.asked) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failed_request_is_sent_again(status: int) -> None:
    with judge_server(lambda asked, number: (status, "busy") if number < 3 else (200, "yes")) as judge:
        assert verdicts(JudgeReward("m", judge.url, retries=3), ["4"]) == [1.0]
    assert len(judge.asked) == 3


def test_requests_are_in_flight_together_and_bounded() -> None:
    def slow(asked: str, number: int) -> tuple[int, str]:
        time.sleep(0.2)
        return 200, "yes"

    with judge_server(slow) as judge:
        assert verdicts(JudgeReward("m", judge.url, concurrency=3), [str(i) for i in range(9)]) == [1.0] * 9
    assert judge.most_at_once == 3


def test_requests_are_spaced() -> None:
    started = time.monotonic()
    with judge_server(lambda asked, number: (200, "yes")) as judge:
        verdicts(JudgeReward("m", judge.url, requests_per_minute=600), ["1", "2", "3", "4", "5"])
    assert time.monotonic() - started >= 0.4  # four gaps of a tenth of a second: a lower bound that no machine can miss


def test_groups_are_judged_together_in_a_run() -> None:
    """All groups' requests are open at once, although each group is a call of its own."""

    def slow(asked: str, number: int) -> tuple[int, str]:
        time.sleep(0.5)
        return 200, "yes"

    with judge_server(slow) as judge:
        reward = RewardSum({"judge": JudgeReward("m", judge.url)}, {"judge": 1.0}, scoring=ScoringConfig(timeout=60))
        groups = [[make_rollout(group_id=g, text=f"{g}{i}", sample_index=i) for i in range(2)] for g in range(4)]
        for group in groups:
            reward.start(group, TrainingState(1, 2))
        reward.finish()
        reward.close()
    assert [r.reward for group in groups for r in group] == [1.0] * 8
    assert judge.most_at_once == 8


def test_a_reply_without_a_verdict_names_the_row() -> None:
    with judge_server(lambda asked, number: (200, "hm" if "Response:\nodd\n" in asked else "no")) as judge:
        reward = RewardSum({"judge": JudgeReward("m", judge.url)}, {"judge": 1.0}, scoring=ScoringConfig(timeout=60))
        reward.start([make_rollout(text="a"), make_rollout(text="odd", sample_index=1)], TrainingState(1, 2))
        with pytest.raises(RewardError, match=r"reward\.judge raised ValueError: the judge replied 'hm'.*'odd'"):
            reward.finish()
        reward.close()


def test_a_coroutine_that_hangs_is_stopped() -> None:
    async def hangs(*, completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(600 if "hang" in completions else 0)
        return [1.0] * len(completions)

    reward = RewardSum({"hangs": hangs}, {"hangs": 1.0}, scoring=ScoringConfig(timeout=0.3, on_error="zero"))
    group = [make_rollout(text="a"), make_rollout(text="hang", sample_index=1)]
    reward.start(group, TrainingState(1, 2))
    reward.finish()
    reward.close()
    assert [r.reward for r in group] == [1.0, 0.0]
    assert group[1].reward_errors == {"hangs": "took over 0.3 s and was stopped"}


def test_the_key_stays_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="api_key_env=JUDGE_KEY: this environment variable is not set"):
        JudgeReward("m", api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judge_server(yes_to_four) as judge:
        verdicts(JudgeReward("m", judge.url, api_key_env="JUDGE_KEY"), ["4"])
    assert judge.keys == ["Bearer secret"]
    with pytest.raises(UserError, match="not a regular expression"):
        JudgeReward("m", pattern="(")
