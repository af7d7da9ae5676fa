"""The policy model's graph."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost import distributed
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import pack
from rlpost.errors import UserError
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.objective import Objective
from rlpost.trainer import model as trainer_model
from rlpost.types import StepTotals
from tests.objective.test_objective import CORRECTIONS, LOSSES, REDUCERS
from tests.trainer.test_policy import rollouts


def backward_nodes(output: torch.Tensor) -> Iterator[str]:
    pending, seen = [output.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node.name()
            pending += [parent for parent, _ in node.next_functions]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_adds_up_in_an_order_that_threads_decide(loss: str, tiny_dir: Path) -> None:
    """Indexing with repeats (IndexBackward0) sums by atomic additions on several threads: equal runs would differ in
    their last bits whenever the machine is busy."""
    policy_model = trainer_model.shard(
        trainer_model.load(tiny_dir), SamplingDistribution(), distributed.sharding_mesh(), TrainerConfig()
    )
    made = rollouts()
    (batch,) = pack(made, [True] * len(made), 10_000)
    objective = Objective(LOSSES[loss], REDUCERS["function"], CORRECTIONS, entropy_coef=0.1)
    out = objective(batch, *policy_model(batch), StepTotals(len(made), 40, 8))
    names = set(backward_nodes(out.loss))
    assert "IndexSelectBackward0" in names
    assert not {name for name in names if name.startswith(("IndexBackward", "IndexPut", "Scatter"))}


def test_a_head_that_is_not_plain_is_refused(tiny_dir: Path) -> None:
    model = trainer_model.load(tiny_dir, "padded")
    plain = type(model).forward

    class Capped(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            output.logits = torch.tanh(output.logits)
            return output

    model.__class__ = Capped
    with pytest.raises(UserError, match="Capped changes its head's output"):
        trainer_model._check_plain_head(model)
