"""Signatures read from source, without importing it."""

import ast
import sys
from pathlib import Path

import pytest

from rlpost.config.source import find
from rlpost.config.targets import check_target, constant_of, mismatch
from rlpost.errors import UserError

MODULE = """
raise RuntimeError("a check must not import me")
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class Base:
    a: int
    kind: ClassVar[str] = "x"
    hidden: dict = field(default_factory=dict, init=False)

@dataclass
class Child(Base):
    b: float | None = None
    c: list = field(default_factory=list)

class Plain:
    def __init__(self, x: int, *, y: bool = False, **more): ...

class Inherits(Plain):
    pass

def function(n: int, /, word: str = "w") -> None: ...

def build(): ...
alias = function
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('nor me')")
    (tmp_path / "pkg" / "targets_mod.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def check(target: str, **settings: object) -> None:
    check_target({"_target_": f"pkg.targets_mod.{target}", **settings}, "key")


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("Child", {"a": 1}),
        ("Child", {"a": 1, "b": 2, "c": [1]}),
        ("Child", {"a": 1, "b": None}),
        ("Plain", {"x": 1, "y": True, "anything": 3}),
        ("Inherits", {"x": 1}),
        ("function", {"n": 1, "word": "v"}),
        ("alias", {"whatever": 1}),  # not to be told from the source
        ("Child", {"_partial_": True}),
    ],
)
def test_right_settings_pass(target: str, settings: dict[str, object]) -> None:
    check(target, **settings)
    assert "pkg" not in sys.modules


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("Child", {}, r"key\.a is missing"),
        ("Child", {"a": 1, "bb": 2}, r"key\.bb: .*did you mean 'b'"),
        ("Child", {"a": 1, "hidden": {}}, r"key\.hidden"),
        ("Child", {"a": 1, "kind": "y"}, r"key\.kind"),
        ("Child", {"a": "one"}, r"key\.a=one: expected int, not str"),
        ("Child", {"a": True}, r"key\.a=True: expected int, not bool"),
        ("Child", {"a": 1, "b": "x"}, r"key\.b=x: expected float \| None"),
        ("Plain", {"x": 1, "y": 3}, r"key\.y=3: expected bool"),
        ("function", {"word": "v"}, r"key\.n is missing"),
        ("build", {"x": 1}, r"key\.x: there is no such setting"),
        ("Chold", {}, r"has no 'Chold'; did you mean 'Child'"),
    ],
)
def test_wrong_settings_are_named(target: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(target, **settings)


def test_injected_parameters_are_not_the_users() -> None:
    node = {"_target_": "pkg.targets_mod.Child"}
    check_target(node, "key", frozenset({"a"}))
    with pytest.raises(UserError, match=r"key\.a"):
        check_target({**node, "a": 1}, "key", frozenset({"a"}))


def test_modules_that_are_not_there() -> None:
    with pytest.raises(UserError, match="no module 'nowhere'"):
        find("nowhere", "Thing", "key")
    with pytest.raises(UserError, match=r"no module 'pkg\.nowhere'"):
        find("pkg.nowhere", "Thing", "key")


def test_constants_are_read_from_the_class_or_a_base_of_it() -> None:
    assert constant_of("pkg.targets_mod.Child", "kind", "none") == "x"
    assert constant_of("pkg.targets_mod.Plain", "kind", "none") == "none"
    assert constant_of("pkg.nowhere.Thing", "kind", "none") == "none"
    assert "pkg" not in sys.modules


def test_compiled_modules_cannot_be_read() -> None:
    assert find("math", "sqrt", "key") is None


@pytest.mark.parametrize(
    ("value", "annotation", "ok"),
    [
        ("k1", "Literal['k1', 'k2']", True),
        ("k9", "Literal['k1', 'k2']", False),
        (None, "Literal['k1'] | None", True),
        (3, "Sequence[int]", True),
        (3, "float", True),
        (3.5, "int", False),
    ],
)
def test_mismatch(value: object, annotation: str, ok: bool) -> None:
    assert (mismatch(value, ast.parse(annotation, mode="eval").body) is None) == ok
