"""rlpost-view: what the page shows of a run's files."""

import json
import math
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from rlpost.commands.view import parse_steps
from rlpost.errors import UserError
from rlpost.evaluate import Correctness
from rlpost.record.completions import completions_table
from rlpost.record.page import read_groups, spread_steps
from tests.conftest import make_rollout
from tests.runs import command

CONFIG = """
run_dir: here
tracking: {experiment: small}
name: small
model: {_target_: rlpost.models.tiny.TinyLlama}
reward: {number: {_target_: rlpost.rewards.number.NumberReward}}
evaluation: {correct_function: null, correct_threshold: 1.0}
"""


def save(run: Path, steps: list[int], per_step: int = 2) -> None:
    (run / "completions").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    for step in steps:
        rollouts = [
            make_rollout(
                3, completion=(72, 73, 33), sample_index=i, text="HI!", reward=float(i), logprobs=(-1.0, -2.0, -0.5)
            )
            for i in range(per_step)
        ]
        for rollout in rollouts:
            rollout.rewards = {"number": rollout.reward}
        rollouts[0].trainer_logprobs = torch.tensor([-1.0, -2.0 + math.log(2), -0.5])
        rollouts[1].rewards, rollouts[1].reward = {"number": math.nan}, math.nan
        rollouts[1].reward_errors = {"number": "raised </script>"}
        pq.write_table(completions_table(rollouts, step), run / "completions" / f"step-{step:06d}.parquet")


def test_groups_hold_tokens_logprobs_ratios_and_rewards(tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    first, second = read_groups(tmp_path, [1, 2], Correctness("number"), chr)
    assert (first["step"], second["step"], first["id"]) == (1, 2, 3)
    sample, other = first["samples"]
    assert sample["tokens"] == ["H", "I", "!"]
    assert sample["logprobs"] == [-1.0, -2.0, -0.5]
    assert sample["ratios"] == [1.0, 2.0, 1.0]
    assert sample["rewards"] == {"number": 0.0}
    assert sample["sampled"] is None
    assert (other["rewards"], other["reward"], other["ratios"]) == ({"number": None}, None, [])
    assert other["errors"] == "number raised </script>"
    assert read_groups(tmp_path, [1], Correctness("number"), None)[0]["samples"][0]["tokens"] == ["HI!"]


def test_steps_are_chosen(tmp_path: Path) -> None:
    assert parse_steps("1,3-5", [1, 2, 3, 4, 9]) == [1, 3, 4]
    with pytest.raises(UserError, match=r"the run has saved steps 1\.\.9"):
        parse_steps("10-12", [1, 9])
    for text in ("a", "1-", "1-b", ""):
        with pytest.raises(UserError, match="expected numbers and ranges"):
            parse_steps(text, [1])
    save(tmp_path, list(range(1, 8)), per_step=700)
    assert spread_steps(tmp_path, list(range(1, 8))) == [1, 7]


def view(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command("rlpost.commands.view", *arguments)


def test_the_page_is_whole_and_safe(tmp_path: Path) -> None:
    save(tmp_path, [1, 2, 3])
    done = view(str(tmp_path), "--steps", "2-3")
    assert done.returncode == 0, done.stderr
    assert "2 of 3 steps" in done.stdout
    page = (tmp_path / "completions.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    groups = json.loads(data)["groups"]
    assert [group["step"] for group in groups] == [2, 3]
    assert groups[0]["samples"][1]["errors"] == "number raised </script>"
    assert "http" not in page.replace("http-equiv", "")


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    done = view(str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rlpost-view: {tmp_path}: not a run directory (no config.yaml)\n"
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert "no saved completions yet" in view(str(tmp_path)).stderr
