"""What a `_target_` accepts, read from its source without importing it.

Importing most targets means importing torch; a wrong keyword must be answered in about a second. So the
signature comes from the syntax tree: functions, classes with __init__, dataclasses, and what they inherit. What
cannot be read this way (C extensions, generated classes) is left to the call itself.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlpost.errors import UserError, nearest, require

SPECIAL_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
SIMPLE_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}


@dataclass(frozen=True)
class Parameter:
    required: bool
    annotation: ast.expr | None


@dataclass(frozen=True)
class Signature:
    parameters: Mapping[str, Parameter]
    takes_any_keyword: bool


def check_target(node: Mapping[str, Any], key: str, injected: frozenset[str] = frozenset()) -> None:
    """Check a `_target_` node's keywords against the target's signature.

    Args:
        key: where the node stands, for the message.
        injected: parameters that the program fills in itself.

    Raises: UserError naming the key and the nearest valid one.
    """
    target = node["_target_"]
    signature = read_signature(*target.rpartition(".")[::2], f"{key}._target_")
    if signature is None or node.get("_args_"):
        return
    given = {name: value for name, value in node.items() if name not in SPECIAL_KEYS}
    valid = [name for name in signature.parameters if name not in injected]
    for name, value in given.items():
        if name not in valid and not (signature.takes_any_keyword and name not in injected):
            raise UserError(f"{key}.{name}: {target} has no such setting{nearest(name, valid)}")
        parameter = signature.parameters.get(name)
        if parameter is not None and parameter.annotation is not None:
            expected = mismatch(value, parameter.annotation)
            if expected:
                raise UserError(f"{key}.{name}={value}: expected {expected}, not {type(value).__name__}")
    if node.get("_partial_"):
        return
    for name in valid:
        if signature.parameters[name].required and name not in given:
            raise UserError(f"{key}.{name} is missing: {target} needs it; set {key}.{name}=...")


def read_signature(module_name: str, name: str, key: str) -> Signature | None:
    """The signature of a function or class of a module (or a .py file); None if the source does not tell.

    Raises: UserError if the module or the name in it does not exist.
    """
    where = f"{key}={module_name}.{name}"
    path = Path(module_name) if module_name.endswith(".py") else _module_file(module_name) if module_name else None
    if path is None or not path.is_file():
        if module_name and _importable(module_name):
            return None
        raise UserError(f"{where}: there is no module {module_name or name!r} on the Python path")
    if path.suffix != ".py":
        return None
    module = ast.parse(path.read_text(encoding="utf-8"))
    definition = _find(module, name)
    if definition is None:
        names = [n for n in _defined_names(module) if not n.startswith("_")]
        if name in names:
            return None
        raise UserError(f"{where}: {module_name} has no {name!r}{nearest(name, names)}")
    if isinstance(definition, ast.ClassDef):
        return _class_signature(definition, module, module_name)
    return _function_signature(definition, skip_first=False)


def check_packages(target: str, needed_by: str) -> None:
    """Check that what one of rlpost's own classes needs beyond the base install is there.

    Args: needed_by: what asks for the class, for the message.

    Raises: UserError that names the extra to install.
    """
    if target.startswith("rlpost."):
        require(required_packages(target), needed_by)


def required_packages(target: str) -> Mapping[str, str]:
    """A class's `requires_packages`, as `rlpost.errors.require` takes them; empty without."""
    module_name, _, name = target.rpartition(".")
    path = _module_file(module_name)
    if path is None or path.suffix != ".py":
        return {}
    definition = _find(ast.parse(path.read_text(encoding="utf-8")), name)
    if isinstance(definition, ast.ClassDef):
        for statement in definition.body:
            match statement:
                case ast.AnnAssign(target=ast.Name("requires_packages"), value=ast.expr() as packages):
                    return ast.literal_eval(packages)
    return {}


def mismatch(value: Any, annotation: ast.expr) -> str | None:
    """What an annotation of simple types expects, if the value is none of it; None if it fits or cannot be told."""
    options = list(_union_members(annotation))
    for option in options:
        if isinstance(option, ast.Subscript) and ast.unparse(option.value).endswith("Literal"):
            elements = option.slice.elts if isinstance(option.slice, ast.Tuple) else [option.slice]
            if value in [e.value for e in elements if isinstance(e, ast.Constant)]:
                return None
        else:
            kind = SIMPLE_TYPES.get(ast.unparse(option))
            if kind is None:
                return None
            fits = isinstance(value, (int, float) if kind is float else kind)
            if fits and not (isinstance(value, bool) and kind in (int, float)):
                return None
    return ast.unparse(annotation).replace("Literal", "one of ")


def _union_members(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _union_members(annotation.left)
        yield from _union_members(annotation.right)
    else:
        yield annotation


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


def _find(module: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    for statement in module.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            return statement
    return None


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
    num_required = len(positional) - len(args.defaults)
    parameters = {arg.arg: Parameter(index < num_required, arg.annotation) for index, arg in enumerate(positional)}
    if skip_first and positional:
        del parameters[positional[0].arg]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters[arg.arg] = Parameter(default is None, arg.annotation)
    return Signature(parameters, args.kwarg is not None)


def _class_signature(definition: ast.ClassDef, module: ast.Module, module_name: str) -> Signature | None:
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _function_signature(statement, skip_first=True)
    inherited: dict[str, Parameter] = {}
    takes_any_keyword = False
    for base in definition.bases:
        base_name = ast.unparse(base).split("[")[0]
        if base_name in ("object", "Protocol", "Generic", "ABC"):
            continue
        signature = _base_signature(base_name, module, module_name)
        if signature is None:
            return None
        inherited.update(signature.parameters)
        takes_any_keyword |= signature.takes_any_keyword
    if not any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        return Signature(inherited, takes_any_keyword)
    own = dict(_dataclass_fields(definition))
    return Signature({**inherited, **own}, takes_any_keyword=False)


def _base_signature(name: str, module: ast.Module, module_name: str) -> Signature | None:
    local = _find(module, name)
    if isinstance(local, ast.ClassDef):
        return _class_signature(local, module, module_name)
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    try:
                        return read_signature(statement.module, alias.name, module_name)
                    except UserError:
                        return None
    return None


def _dataclass_fields(definition: ast.ClassDef) -> Iterator[tuple[str, Parameter]]:
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        default = statement.value
        required = default is None
        if isinstance(default, ast.Call) and ast.unparse(default.func).endswith("field"):
            options = {keyword.arg: keyword.value for keyword in default.keywords}
            init = options.get("init")
            if isinstance(init, ast.Constant) and init.value is False:
                continue
            required = "default" not in options and "default_factory" not in options
        yield statement.target.id, Parameter(required, statement.annotation)
