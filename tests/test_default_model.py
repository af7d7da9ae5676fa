"""The default model, as users first meet it: vLLM, float32, 135 million weights."""

import shutil
from pathlib import Path

import pytest

from tests.runs import assert_equal, exact, rlpost, rows, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # two starts of 135 million weights

SMOLLM2 = ["prompts_per_step=2", "samples_per_prompt=4", "steps=2", "rollout.max_tokens=12", "tracking=none"]


def test_the_default_model_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    rlpost(tmp_path, *SMOLLM2, "evaluation.at_end=false", "checkpoint.every=1", "run_dir=whole")
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step-000002")
    (again / "status.json").unlink()
    rlpost(tmp_path, "run_dir=again", "resume=true")
    assert exact(again) == exact(whole)
    assert_equal(weights(again, 2), weights(whole, 2))
    assert all(row["rollout/logprob_diff_max"] < 1e-3 for row in rows(whole))
