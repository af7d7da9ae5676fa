"""The default model: vLLM, float32, 135 million weights; on GSM8K where its files are at hand."""

import shutil
from pathlib import Path

import pytest

from tests.runs import assert_equal, exact, rlpost, rows, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # two starts of 135 million weights

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
SIZES = ["prompts_per_step=2", "samples_per_prompt=2", "steps=2", "rollout.max_tokens=12", "tracking=none"]


# So short an answer is hardly ever right: the completions of a group would all have the same reward, and no gradient.
PLACES = "def places(*, completions, **_):\n    return list(range(len(completions)))\n"


def test_the_default_model_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "places.py").write_text(PLACES)
    (tmp_path / "mine/reward").mkdir(parents=True)
    (tmp_path / "mine/reward/places.yaml").write_text("places:\n  _target_: places.places\n  _partial_: true\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = ["--config-dir", "mine", "plugins.allow=[places]", "reward=[math,places]"]
    if GSM8K.is_dir():
        task += ["experiment=gsm8k", f"task.path={GSM8K}/train.jsonl", f"task.held_out_path={GSM8K}/test.jsonl"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    rlpost(tmp_path, *task, *SIZES, "evaluation.at_end=false", "checkpoint.every=1", "run_dir=whole")
    for row in rows(whole):
        assert row["rollout/logprob_diff_max"] < 1e-3
        assert row["reward/errors"] == row["reward/not_applicable"] == 0
        assert row["reward/places/mean"] == 0.5
        assert row["policy/grad_norm"] > 0
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step-000002")
    (again / "status.json").unlink()
    rlpost(tmp_path, "run_dir=again", "resume=true")
    assert exact(again) == exact(whole)
    assert_equal(weights(again, 2), weights(whole, 2))
