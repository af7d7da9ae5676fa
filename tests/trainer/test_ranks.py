"""Four real gloo ranks against one: every reducer and every loss, sharded, replicated and in context groups."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import run_ranks
from tests.trainer.ranks_script import CASES


def run(num_ranks: int, out: Path) -> dict[str, Any]:
    run_ranks("tests.trainer.ranks_script", num_ranks, str(out))
    return torch.load(out, weights_only=False)


@pytest.mark.slow
def test_ranks_have_one_ranks_gradients_and_metrics_however_they_are_arranged(tmp_path: Path) -> None:
    alone, together = run(1, tmp_path / "one.pt"), run(4, tmp_path / "four.pt")
    one = alone["updates"][1, 1]
    assert len(one) == 17
    assert list(together["updates"]) == list(CASES)
    for grid, updates in together["updates"].items():
        assert list(updates) == CASES[grid]
        for name, (metrics, gradients) in updates.items():
            expected_metrics, expected = one[name]
            assert metrics == pytest.approx(expected_metrics, rel=1e-10, abs=1e-12), (grid, name)
            assert any(gradient.abs().max() > 1e-6 for gradient in expected.values()), name
            for parameter, gradient in gradients.items():
                message = f"{grid} {name} {parameter}"
                torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-12, msg=message)
    # The policy gradient is in it: reducers differ, and the corrections keep a part.
    norms = {metrics["policy/grad_norm"] for name, (metrics, _) in one.items() if name.startswith("reducer")}
    assert len({round(norm, 6) for norm in norms}) >= 5
    assert 0.1 < one["reducer grpo"][0]["objective/sequence_cut"] < 0.9
    for name in ("everything", "adapters"):
        assert sum(metric.startswith("kl of") for metric in one[name][0]) == 12
    assert all("lora_" in parameter for parameter in one["adapters"][1])

    # Groups of 4, 5, 6 and 7 prompt tokens and about as many completion tokens, dealt out anew: one to each rank.
    before, after = together["dealt"]
    assert [len(share) for share in before] == [9, 3, 0, 0]
    assert [len(share) for share in after] == [3, 3, 3, 3]
    assert sorted(place for share in after for place in share) == sorted(place for share in before for place in share)
    assert all(len({group for group, _ in share}) == 1 for share in after)
    assert sorted(alone["dealt"][1][0]) == sorted(alone["dealt"][0][0])
    assert together["sharing"] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert alone["sharing"] == [(0, [0])]
