"""Two real gloo ranks against one: every reducer and every loss, to float64 rounding."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(num_ranks: int, out: Path) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*torchrun, "-m", "tests.trainer.ranks_script", str(out)]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.slow
def test_two_ranks_have_one_ranks_gradients_and_metrics(tmp_path: Path) -> None:
    alone, together = run(1, tmp_path / "one.pt"), run(2, tmp_path / "two.pt")
    one, two = alone["updates"], together["updates"]
    assert len(one) == 15
    for name, (metrics, grads) in one.items():
        assert two[name][0] == pytest.approx(metrics, rel=1e-10, abs=1e-12), name
        assert any(grad.abs().max() > 1e-6 for grad in grads.values()), name
        for parameter, grad in grads.items():
            torch.testing.assert_close(two[name][1][parameter], grad, rtol=1e-9, atol=1e-12, msg=f"{name} {parameter}")
    # The policy gradient is in it: reducers differ, and the corrections keep a part.
    norms = {metrics["policy/grad_norm"] for name, (metrics, _) in one.items() if name.startswith("reducer")}
    assert len({round(norm, 6) for norm in norms}) >= 5
    assert 0.1 < one["reducer grpo"][0]["objective/sequence_cut"] < 0.9

    # Groups of 4, 5, 6 and 7 prompt tokens and about as many completion tokens, dealt out anew: two to each rank.
    before, after = together["dealt"]
    assert [len(share) for share in before] == [9, 3]
    assert [len(share) for share in after] == [6, 6]
    assert sorted(place for share in after for place in share) == sorted(place for share in before for place in share)
    assert all(len({group for group, _ in share}) == 2 for share in after)
    assert sorted(alone["dealt"][1][0]) == sorted(alone["dealt"][0][0])
