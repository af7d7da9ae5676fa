"""The default model, as users first meet it: vLLM, float32, 135 million weights."""

from pathlib import Path

import pytest

from tests.runs import assert_equal, exact, kill_in_a_step, rlpost, rows, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # three starts of 135 million weights

SMOLLM2 = ["prompts_per_step=2", "samples_per_prompt=4", "steps=2", "rollout.max_tokens=12", "tracking=none"]


def test_the_default_model_resumes_bit_for_bit(tmp_path: Path) -> None:
    overrides = [*SMOLLM2, "evaluation.at_end=false"]
    rlpost(tmp_path, *overrides, "run_dir=runs/smol")
    kill_in_a_step(tmp_path, "runs/smol-killed", 1, *overrides, "checkpoint.every=1")
    rlpost(tmp_path, "run_dir=runs/smol-killed", "resume=true")
    assert exact(tmp_path / "runs/smol-killed") == exact(tmp_path / "runs/smol")
    assert_equal(weights(tmp_path / "runs/smol-killed", 2), weights(tmp_path / "runs/smol", 2))
    assert all(row["rollout/logprob_diff_max"] < 1e-3 for row in rows(tmp_path / "runs/smol"))
