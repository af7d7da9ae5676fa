"""Definitions of a module, read from its source without importing it.

Importing most targets means importing torch; a wrong keyword must be answered in about a second. So signatures, defaults
and class-level constants come from the syntax tree: of functions, classes with __init__, dataclasses, and what they
inherit. What cannot be read this way (C extensions, generated classes) is left to the call itself.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlpost.errors import UserError, nearest

UNKNOWN: Any = object()  # in place of a value that the source does not tell


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function or class.

    Attributes: default: UNKNOWN where there is none, or where it is no literal.
    """

    required: bool
    annotation: ast.expr | None
    default: Any = UNKNOWN


@dataclass(frozen=True)
class Signature:
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    takes_any_keyword: bool = False


@dataclass(frozen=True)
class Definition:
    """A function or a class, and the module in which it stands."""

    node: ast.ClassDef | ast.FunctionDef
    module: ast.Module
    module_name: str

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    def bases(self) -> Iterator["Definition | None"]:
        """The class's bases; None for one whose source is not at hand."""
        for base in getattr(self.node, "bases", ()):
            name = ast.unparse(base).split("[")[0]
            if name not in ("object", "Protocol", "Generic", "ABC"):
                yield _named(name, self.module, self.module_name)

    def signature(self) -> Signature | None:
        """Parameters by name; None where a base's source is not at hand."""
        if isinstance(self.node, ast.FunctionDef):
            return _function_signature(self.node, skip_first=False)
        for statement in self.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return _function_signature(statement, skip_first=True)
        inherited: dict[str, Parameter] = {}
        takes_any_keyword = False
        for base in self.bases():
            signature = base and base.signature()
            if signature is None:
                return None
            inherited.update(signature.parameters)
            takes_any_keyword |= signature.takes_any_keyword
        if not any("dataclass" in ast.unparse(decorator) for decorator in self.node.decorator_list):
            return Signature(inherited, takes_any_keyword)
        return Signature({**inherited, **dict(_dataclass_fields(self.node))})

    def constant(self, name: str, default: Any = None) -> Any:
        """A literal that the class, or a base of it, assigns to `name` in its body; otherwise the default."""
        for statement in self.node.body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return literal(statement.value)
        for base in self.bases():
            if base is not None and (value := base.constant(name, UNKNOWN)) is not UNKNOWN:
                return value
        return default


def find(module_name: str, name: str, key: str) -> Definition | None:
    """The definition of a function or class of a module (or a .py file); None if the source does not tell.

    Raises: UserError naming `key` if the module or the name in it does not exist.
    """
    where = f"{key}={module_name}.{name}"
    path = Path(module_name) if module_name.endswith(".py") else _module_file(module_name) if module_name else None
    if path is None or not path.is_file():
        if module_name and _importable(module_name):
            return None
        raise UserError(f"{where}: there is no module {module_name or name!r} on the Python path")
    if path.suffix != ".py":
        return None
    module = _parsed(path, path.stat().st_mtime_ns)
    definition = _named(name, module, module_name)
    names = [n for n in _defined_names(module) if not n.startswith("_")]
    if definition is None and name not in names:
        raise UserError(f"{where}: {module_name} has no {name!r}{nearest(name, names)}")
    return definition


def literal(expression: ast.expr) -> Any:
    """The value of a literal, or of a dataclass field's literal default; otherwise UNKNOWN."""
    if isinstance(expression, ast.Call):
        options = {keyword.arg: keyword.value for keyword in expression.keywords}
        factory = options.get("default_factory")
        if factory is not None:
            made: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}
            return made.get(ast.unparse(factory).split("[")[0], UNKNOWN)
        return literal(options["default"]) if "default" in options else UNKNOWN
    if isinstance(expression, ast.BinOp):  # 2**30
        operands = literal(expression.left), literal(expression.right)
        if isinstance(expression.op, ast.Pow) and UNKNOWN not in operands:
            return operands[0] ** operands[1]
        return UNKNOWN
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return UNKNOWN


@lru_cache(maxsize=256)
def _parsed(path: Path, changed: int) -> ast.Module:
    """Args: changed: when the file was changed last, so that a new version of it is read again."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _named(name: str, module: ast.Module, module_name: str) -> Definition | None:
    for statement in module.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            return Definition(statement, module, module_name)
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    try:
                        return find(statement.module, alias.name, module_name)
                    except UserError:
                        return None
    return None


def _module_file(module_name: str) -> Path | None:
    """The module's source file, found without importing its parents."""
    search: list[str] | None = None
    spec = None
    for depth, _ in enumerate(parts := module_name.split("."), start=1):
        dotted = ".".join(parts[:depth])
        spec = PathFinder.find_spec(dotted, search)
        if spec is None and depth == 1:
            spec = importlib.util.find_spec(dotted)  # editable installs, frozen and built-in modules
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _importable(module_name: str) -> bool:
    return module_name in sys.builtin_module_names or module_name in sys.modules


def _defined_names(module: ast.Module) -> Iterator[str]:
    for statement in module.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            yield from (t.id for t in statement.targets if isinstance(t, ast.Name))


def _function_signature(function: ast.FunctionDef, skip_first: bool) -> Signature:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    pairs = list(zip(positional, defaults, strict=True))[skip_first:]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    parameters = {
        arg.arg: Parameter(default is None, arg.annotation, UNKNOWN if default is None else literal(default))
        for arg, default in pairs
    }
    return Signature(parameters, args.kwarg is not None)


def _dataclass_fields(definition: ast.ClassDef) -> Iterator[tuple[str, Parameter]]:
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        value = statement.value
        required = value is None
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
            options = {keyword.arg: keyword.value for keyword in value.keywords}
            init = options.get("init")
            if isinstance(init, ast.Constant) and init.value is False:
                continue
            required = "default" not in options and "default_factory" not in options
        default = UNKNOWN if value is None else literal(value)
        yield statement.target.id, Parameter(required, statement.annotation, default)
