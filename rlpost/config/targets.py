"""The check of a `_target_` node: it may hold the target's own settings, of their types and within their ranges."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rlpost.config.ranges import RANGES, OneOf, Range
from rlpost.config.source import UNKNOWN, Definition, find
from rlpost.errors import UserError, nearest, require

SPECIAL_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
SIMPLE_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}


def definition_of(target: str, key: str) -> Definition | None:
    """The definition that a `_target_` names; None if its source does not tell.

    Raises: UserError naming `key` where there is no such class or function.
    """
    module_name, _, name = target.rpartition(".")
    return find(module_name, name, f"{key}._target_")


def constant_of(target: str, name: str, default: Any) -> Any:
    """The value of a target's class-level constant, such as `samples_beside_training`; the default if it cannot be read."""
    try:
        definition = definition_of(target, target)
    except UserError:  # `check_target` says what is wrong with it, and where
        return default
    return default if definition is None else definition.constant(name, default)


def check_target(node: Mapping[str, Any], key: str, injected: frozenset[str] = frozenset()) -> None:
    """Check a `_target_` node's keywords against the target's signature.

    Args:
        key: where the node stands, for the message.
        injected: parameters that the program fills in itself.

    Raises: UserError naming the key and the nearest valid one.
    """
    target = node["_target_"]
    definition = definition_of(target, key)
    signature = definition and definition.signature()
    if signature is None or node.get("_args_"):
        return
    given = {name: value for name, value in node.items() if name not in SPECIAL_KEYS}
    valid = [name for name in signature.parameters if name not in injected]
    for name, value in given.items():
        if name not in valid and not (signature.takes_any_keyword and name not in injected):
            raise UserError(f"{key}.{name}: there is no such setting{nearest(name, valid)}")
        parameter = signature.parameters.get(name)
        if parameter is not None and parameter.annotation is not None:
            expected = mismatch(value, parameter.annotation)
            if expected:
                raise UserError(f"{key}.{name}={value}: {expected}")
    if node.get("_partial_"):
        return
    for name in valid:
        if signature.parameters[name].required and name not in given:
            raise UserError(f"{key}.{name} is missing: {target} needs it; set {key}.{name}=...")


def defaults_of(node: Mapping[str, Any], key: str, injected: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The settings that a node leaves to its target, with the target's own defaults."""
    definition = definition_of(node["_target_"], key)
    signature = definition and definition.signature()
    if signature is None or node.get("_args_") or node.get("_partial_"):
        return {}
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in node and name not in injected and parameter.default is not UNKNOWN
    }


def check_packages(target: str, needed_by: str) -> None:
    """Check that what one of rlpost's own classes needs beyond the base install, by its `requires_packages`, is there.

    Args: needed_by: what asks for the class, for the message.

    Raises: UserError that names the extra to install.
    """
    if target.startswith("rlpost."):  # others' packages are no extras of rlpost
        require(constant_of(target, "requires_packages", {}), needed_by)


def mismatch(value: Any, annotation: ast.expr) -> str | None:
    """The end of the message about a value that an annotation of simple types does not allow; None if it fits or cannot
    be told.
    """
    outside: list[str] = []
    for option in _union_members(annotation):
        option, range_ = _without_range(option)
        fits = _fits(value, option)
        if fits is None:
            return None
        if fits:
            if range_ is None or range_.holds(value):
                return None
            # YAML writes a float of -1.0 as -1 too: the message is about the setting's type
            outside.append(range_.expected(float(value) if ast.unparse(option) == "float" else value))
    if outside:
        return outside[0]
    kinds = [option for option in _union_members(annotation) if ast.unparse(option) != "None"]
    if len(kinds) == 1 and (choices := _literals(kinds[0])):
        return OneOf(*choices).expected(value)
    return f"expected {_in_words(annotation)}, not {type(value).__name__}"


def _fits(value: Any, option: ast.expr) -> bool | None:
    """True if a value is of a type; None if the type is not a simple one."""
    if isinstance(option, ast.Subscript):
        if choices := _literals(option):
            return value in choices
        elements = option.slice.elts if isinstance(option.slice, ast.Tuple) else [option.slice]
        if ast.unparse(option.value) == "tuple" and not any(isinstance(e, ast.Constant) for e in elements):
            if not isinstance(value, list | tuple):
                return False
            values = cast(list[Any], value)
            if len(values) != len(elements):
                return False
            return all(mismatch(v, e) is None for v, e in zip(values, elements, strict=True))
        return None
    simple = SIMPLE_TYPES.get(ast.unparse(option))
    if simple is None:
        return None
    fits = isinstance(value, (int, float) if simple is float else simple)
    return fits and not (isinstance(value, bool) and simple in (int, float))


def _literals(option: ast.expr) -> list[Any]:
    """The values of a Literal; [] for another type."""
    if not isinstance(option, ast.Subscript) or ast.unparse(option.value) != "Literal":
        return []
    elements = option.slice.elts if isinstance(option.slice, ast.Tuple) else [option.slice]
    return [e.value for e in elements if isinstance(e, ast.Constant)]


def _without_range(option: ast.expr) -> tuple[ast.expr, Range | None]:
    """The type and the range of Annotated[type, range]."""
    if isinstance(option, ast.Subscript) and ast.unparse(option.value).endswith("Annotated"):
        assert isinstance(option.slice, ast.Tuple)
        kind, *extras = option.slice.elts
        for extra in extras:
            if isinstance(extra, ast.Call) and (made := RANGES.get(ast.unparse(extra.func))):
                keywords = {k.arg: ast.literal_eval(k.value) for k in extra.keywords if k.arg}
                return kind, made(*map(ast.literal_eval, extra.args), **keywords)
        return kind, None
    return option, None


def range_of_annotation(annotation: ast.expr) -> list[Range]:
    """The ranges that an annotation states for its types."""
    return [range_ for option in _union_members(annotation) if (range_ := _without_range(option)[1])]


def _in_words(annotation: ast.expr) -> str:
    """The types of an annotation, as a reader of a message expects them: `float | max_tokens`."""
    kinds = [_without_range(option)[0] for option in _union_members(annotation)]
    return " | ".join(", ".join(map(str, _literals(kind))) or ast.unparse(kind) for kind in kinds)


def _union_members(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _union_members(annotation.left)
        yield from _union_members(annotation.right)
    else:
        yield annotation
