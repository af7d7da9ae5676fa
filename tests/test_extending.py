"""What a user adds from outside the package: one new file and one YAML, or one override."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlpost.config.validation import validate
from rlpost.errors import UserError
from tests.runs import LIGHT, rlpost, rows
from tests.test_config import plain

LAB = '''
"""A laboratory's own reducer, metric, engine and cluster."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rlpost.config.ranges import Above


@dataclass(frozen=True)
class ScaledMean:
    """GRPO's weights times a factor.

    Attributes: factor: the factor.
    """

    factor: Annotated[float, Above(0)] = 0.5

    def __call__(self, tokens, totals):
        lengths = tokens.active_lengths.clamp(min=1).double()[tokens.sequence_index]
        return self.factor * tokens.loss_mask / (totals.num_sequences * lengths)


def repeats(rollouts):
    """The share of tokens that equal the token before, over all completions of the step."""
    pairs = [pair for r in rollouts for pair in zip(r.completion.token_ids, r.completion.token_ids[1:])]
    assert all(len(r.trainer_logprobs) == len(r.completion.token_ids) for r in rollouts)
    return {"share": sum(a == b for a, b in pairs) / max(1, len(pairs)), "rollouts": len(rollouts)}


class Engine:
    guides_completions: ClassVar[bool] = True
    samples_beside_training = True
    ranks_per_replica = "split"

    def __init__(
        self, directory, end_token_ids, max_model_len, split: Annotated[int, Above(0)] = 1, trust_remote_code=False
    ): ...


class Bare:
    def __init__(self, directory, end_token_ids, max_model_len, trust_remote_code=False): ...


class TwoRanks:
    num_ranks = 2

    def launch(self, run_dir): ...


@dataclass(frozen=True)
class Relative:
    is_group_relative = True
'''
CHOICE = "_target_: toylab.ScaledMean\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toylab.py").write_text(LAB)
    (tmp_path / "conf" / "reducer").mkdir(parents=True)
    (tmp_path / "conf" / "reducer" / "scaled.yaml").write_text(CHOICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_reducer_and_a_metric_of_ones_own(lab: Path) -> None:
    """The objective's scale against GRPO's is the reducer's factor; the metric sees every rollout of both ranks."""
    added = [f"hydra.searchpath=[file://{lab}/conf]", "plugins.allow=[toylab]", "metrics.repeats=toylab:repeats"]
    settings = ["cluster=cpu2", "reducer=scaled", "reducer.factor=0.25", "steps=2", "tracking=none", "run_dir=run"]
    rlpost(lab, *LIGHT, *added, *settings, PYTHONPATH=str(lab))
    for row in rows(lab / "run"):
        assert row["objective/pg_scale"] == pytest.approx(0.25) or row["objective/pg_scale"] is None
        assert row["repeats/rollouts"] == 16
        assert 0 <= row["repeats/share"] <= 1
    assert any(row["objective/pg_scale"] for row in rows(lab / "run"))


def configured(*overrides: str, **nodes: str) -> DictConfig:
    """Args: nodes: targets of the laboratory, in place of a plug-in point's node."""
    cfg = plain("plugins.allow=[toylab]", *overrides)
    for place, name in nodes.items():
        OmegaConf.update(cfg, KEYS[place], {"_target_": f"toylab.{name}"}, merge=False)
    return cfg


KEYS = {"engine": "rollout.engine", "cluster": "cluster", "advantage": "algorithm.advantage"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["metrics.mine=toylab:repeat"], "metrics.mine=toylab.repeat: toylab has no 'repeat'; did you mean 'repeats'"),
        (["metrics.mine=toylab:Engine"], r"metrics.mine=toylab:Engine: takes \(directory, .*expected \(rollouts\)"),
        (["reducer._target_=toylab.ScaledMean", "reducer.factor=0"], "reducer.factor=0: expected a number over 0"),
        (["reducer._target_=toylab.ScaledMean", "reducer.facto=1"], "reducer.facto: .*did you mean 'factor'"),
    ],
)
def test_what_is_added_gets_the_same_checks(lab: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(configured(*overrides))


@pytest.mark.parametrize(
    ("nodes", "overrides", "message"),
    [
        ({"engine": "Bare"}, ["rollout.regex=a"], "Bare does not guide completions"),
        ({"engine": "Bare"}, ["rollout.staleness=1"], "nobody to sample beside the update: Bare works in"),
        ({"engine": "Engine"}, ["rollout.staleness=1"], "correct for it"),  # it passes the rule about the engine
        ({"cluster": "TwoRanks"}, ["prompts_per_step=3"], "use a multiple of 2"),
        ({"advantage": "Relative"}, ["samples_per_prompt=1"], "needs at least 2"),
    ],
)
def test_what_is_added_says_what_it_can_do(
    lab: Path, nodes: dict[str, str], overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate(configured(*overrides, **nodes))


def test_ranks_may_share_an_engine_of_ones_own(lab: Path) -> None:
    cfg = configured("rollout.regex=a", engine="Engine")
    cfg.rollout.engine.split = 2
    with pytest.raises(UserError, match=r"rollout\.engine\.split=2 does not divide the cluster's 1 processes"):
        validate(cfg)
    cfg.cluster.num_processes = 2
    assert validate(cfg).rollout.engine == {"_target_": "toylab.Engine", "split": 2}
