"""The house rules that can be checked: imports only downwards and declared, collectives in one package."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "rlpost").rglob("*.py"))


def test_import_contracts() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout


def test_dependencies_are_declared_and_used() -> None:
    deptry = [Path(sys.executable).with_name("deptry"), ".", "--no-ansi"]
    result = subprocess.run(deptry, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_collectives_are_in_one_package() -> None:
    call = re.compile(r"\bdist\.\w|all_reduce|all_gather|broadcast_object|full_tensor\(|init_process_group|barrier\(\)")
    users = {p.relative_to(ROOT).parent.as_posix() for p in SOURCES if call.search(p.read_text(encoding="utf-8"))}
    users.discard("rlpost/trainer")  # its checkpoints ask for barriers
    assert users == {"rlpost/distributed"}


def test_every_target_is_held_to_its_protocol() -> None:
    """The type checker holds the classes of tests/protocols.py to the protocols of their plug-in points."""
    tables = (ROOT / "tests" / "protocols.py").read_text(encoding="utf-8").partition("\nadvantages: ")[2]
    chosen = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "conf").glob("**/*.yaml"))
    targets = set(re.findall(r"_target_: rlpost[\w.]*\.(\w+)", chosen))
    assert len(targets) > 20
    assert targets <= set(re.findall(r"\w+", tables))


def test_only_the_builder_instantiates() -> None:
    users = {
        p.relative_to(ROOT).as_posix() for p in SOURCES if re.search(r"\binstantiate\(", p.read_text(encoding="utf-8"))
    }
    assert users == {"rlpost/config/build.py"}


def test_the_front_door_loads_no_heavy_module() -> None:
    script = (
        "import sys, rlpost.__main__, rlpost.config.targets, rlpost.data.tasks, rlpost.models.sources\n"
        "import rlpost.cluster.local, rlpost.cluster.slurm, rlpost.cluster.ray\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'mlflow', 'datasets'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
