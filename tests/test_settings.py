"""Settings: declared once, completed from their targets, and written down in docs/settings.md."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from rlpost.config.build import typed
from rlpost.config.ranges import Above, AtLeast, Finite, OneOf, Within, meaning_of
from rlpost.config.reference import reference
from rlpost.config.schema import MISSING, Config, KLConfig, RewardConfig
from rlpost.config.targets import defaults_of
from rlpost.config.validation import validate
from tests.test_config import CONF, ROOT, plain


def sections(kind: type = Config) -> list[type]:
    hints = get_type_hints(kind)
    inner = [hints[f.name] for f in fields(kind) if is_dataclass(hints[f.name])]
    return [kind, *(section for one in inner for section in sections(one))]


@pytest.mark.parametrize("section", [*sections(), RewardConfig], ids=lambda s: s.__name__)
def test_every_setting_says_what_it_means_in_a_sentence(section: type) -> None:
    hints = get_type_hints(section)
    for field in fields(section):
        if not is_dataclass(hints[field.name]) and field.name != "target":
            meaning = meaning_of(field)
            assert meaning[:1].isupper() or meaning.startswith("`"), field.name
            assert meaning.endswith("."), field.name


def test_the_page_of_settings_is_not_stale() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == reference(), "make docs writes it anew"


def test_the_page_lists_every_setting_and_leaves_no_meaning_out() -> None:
    page = reference()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []

    def keys(kind: type, prefix: str) -> list[str]:
        hints = get_type_hints(kind)
        return [
            key
            for f in fields(kind)
            for key in (
                keys(hints[f.name], f"{prefix}{f.name}.") if is_dataclass(hints[f.name]) else [f"{prefix}{f.name}"]
            )
        ]

    listed = {row.split("`")[1] for row in rows}
    assert set(keys(Config, "")) <= listed


def test_no_shipped_file_repeats_a_default() -> None:
    """Of rlpost's own settings; those of targets are compared below."""
    for file in [CONF / "train.yaml", *CONF.glob("*/*.yaml")]:
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        package = [] if file.parent in (CONF, CONF / "experiment") else [file.parent.name]
        for key, value in leaves(given, package):
            default = OmegaConf.select(OmegaConf.structured(Config), ".".join(key), throw_on_missing=False)
            assert value == MISSING or value != default, f"{file}: {'.'.join(key)}"


def test_no_shipped_file_repeats_a_default_of_its_target() -> None:
    for file in CONF.glob("*/*.yaml"):
        for key, node in target_nodes(yaml.safe_load(file.read_text(encoding="utf-8")) or {}):
            defaults = defaults_of({"_target_": node["_target_"]}, key)
            repeated = {n for n, v in node.items() if n in defaults and as_list(defaults[n]) == v}
            assert not repeated, f"{file}: {repeated}"


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def leaves(node: Any, path: list[str]) -> list[tuple[list[str], Any]]:
    if isinstance(node, dict) and "_target_" not in node:
        return [leaf for name, inner in node.items() for leaf in leaves(inner, [*path, str(name)])]
    return [] if isinstance(node, dict) or path[0] in ("defaults", "hydra") else [(path, node)]


def target_nodes(node: Any, key: str = "") -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(node, dict):
        return []
    own = [(key, node)] if "_target_" in node else []
    return [*own, *(found for name, inner in node.items() for found in target_nodes(inner, f"{key}.{name}"))]


def test_a_setting_of_a_target_need_not_stand_in_its_file() -> None:
    assert "threads" not in yaml.safe_load((CONF / "cluster" / "cpu.yaml").read_text())
    settings = validate(plain("cluster.threads=2", "optimizer.warmup_steps=3", "model=tiny", "model.num_layers=1"))
    assert settings.cluster["threads"] == 2
    assert settings.optimizer["warmup_steps"] == 3
    assert settings.model["num_layers"] == 1


def test_a_validated_configuration_says_all_that_its_targets_run_with() -> None:
    cfg = plain("reward=number")
    validate(cfg)
    assert cfg.optimizer == {
        "_target_": "rlpost.trainer.optimizer.AdamW",
        **{"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        **{"max_grad_norm": 1.0, "schedule": "constant", "warmup_steps": 0},
    }
    assert (cfg.reward.number.weight, cfg.reward.number.runs_in, cfg.reward.number.tasks) == (1.0, "processes", None)
    assert cfg.rollout.engine.kv_cache_bytes == 2**30
    again = OmegaConf.create(OmegaConf.to_container(cfg))
    assert typed(again) == validate(cfg)


def test_a_choice_leaves_nothing_of_the_one_before() -> None:
    """CISPO's file inherits from GRPO's, whose loss has settings that its own has not."""
    settings = validate(plain("algorithm=cispo"))
    assert settings.algorithm.loss == {
        "_target_": "rlpost.objective.losses.CISPOLoss",
        "eps_low": 1.0,
        "eps_high": 4.0,
    }


@pytest.mark.parametrize(
    ("range_", "inside", "outside", "message"),
    [
        (AtLeast(1), [1, 5], [0, -1], "expected a whole number, at least 1"),
        (AtLeast(0), [0.0, 0.5], [-0.1, float("nan"), float("inf")], "expected a finite number, at least 0"),
        (AtLeast(0, below=1), [0.0, 0.99], [1.0], "expected a finite number, at least 0 and under 1"),
        (Above(0), [0.1], [0.0, float("inf"), float("nan")], "expected a number over 0"),
        (Above(0, 1), [1.0], [0.0, 1.1], "expected a number over 0 and at most 1"),
        (Within(0, 1), [0, 1], [-0.1, 1.1, float("nan")], "expected a number in 0..1"),
        (Finite(), [0.0, -3.0], [float("inf"), float("nan")], "expected a finite number"),
        (OneOf("loss", "reward"), ["loss"], ["x"], "expected one of loss, reward"),
        (OneOf("loss", "reward"), ["loss"], ["los"], "did you mean 'loss'?"),
    ],
)
def test_ranges(range_: Any, inside: list[Any], outside: list[Any], message: str) -> None:
    assert all(range_.holds(value) for value in inside)
    assert not any(range_.holds(value) for value in outside)
    assert range_.expected(outside[0]) == message


@pytest.mark.parametrize(
    ("kl", "in_loss", "in_reward", "reference", "moves"),
    [
        (KLConfig(), 0.0, 0.0, False, False),
        (KLConfig(coef=0.1), 0.1, 0.0, True, False),
        (KLConfig(coef=0.1, place="reward"), 0.0, 0.1, True, False),
        (KLConfig(measure=True, reference_every=2), 0.0, 0.0, True, True),
        (KLConfig(reference_every=2), 0.0, 0.0, False, False),
    ],
)
def test_the_kl_says_where_it_counts_and_what_it_needs(
    kl: KLConfig, in_loss: float, in_reward: float, reference: bool, moves: bool
) -> None:
    assert (kl.loss_coef, kl.reward_coef, kl.needs_reference, kl.moves_reference) == (
        in_loss,
        in_reward,
        reference,
        moves,
    )
