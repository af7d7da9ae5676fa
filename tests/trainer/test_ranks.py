"""Two real gloo ranks against one: every reducer and every loss, to float64 rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gradients(num_ranks: int, out: Path) -> dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*torchrun, "-m", "tests.trainer.ranks_script", str(out)]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.slow
def test_two_ranks_have_one_ranks_gradients_and_metrics(tmp_path: Path) -> None:
    one, two = gradients(1, tmp_path / "one.pt"), gradients(2, tmp_path / "two.pt")
    assert len(one) == 14
    for name, (metrics, grads) in one.items():
        assert two[name][0] == pytest.approx(metrics, rel=1e-10, abs=1e-12), name
        assert any(grad.abs().max() > 1e-6 for grad in grads.values()), name
        for parameter, grad in grads.items():
            torch.testing.assert_close(two[name][1][parameter], grad, rtol=1e-9, atol=1e-12, msg=f"{name} {parameter}")
