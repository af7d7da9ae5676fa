"""The reference of all settings, docs/settings.md: `make docs` writes it from the schema, conf/ and the targets' source."""

import ast
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf

from rlpost.config.build import conf_dir
from rlpost.config.nodes import INJECTED, NAMED, SINGLE, as_dict
from rlpost.config.ranges import default_of, meaning_of, range_of
from rlpost.config.schema import MISSING, Config, Node, RewardConfig
from rlpost.config.source import UNKNOWN, Definition, Parameter
from rlpost.config.targets import definition_of, range_of_annotation

HEADER = """# Settings

`make docs` writes this page from [the schema](../rlpost/config/schema.py), from `conf/` and from the source of what it names;
a test says when it is stale. A setting is given as `key=value` on the command line or under its key in a YAML file.

The first part lists the settings of rlpost itself. A setting of the type *node* is a plug-in point: a group of choices, each
of which names a class or a function (`_target_`) that has settings of its own. The second part lists these: they need not
stand in the YAML file of a choice to be set.
"""
TABLE = "| setting | type | default | values | meaning |\n|---|---|---|---|---|\n"


def reference() -> str:
    """The page."""
    parts = [HEADER, "\n## rlpost's own settings\n\n", *_section(Config, ""), "\n## Plug-in points\n"]
    parts.append("\n### Beside any reward function's own settings\n\n" + TABLE)
    parts += [_row(f"reward.NAME.{f.name}", RewardConfig, f) for f in fields(RewardConfig) if f.name != "target"]
    for key, choices in sorted(_choices().items()):
        parts.append(f"\n### {key}\n\n")
        parts += [f"- `{choice}`: {comment} {_given(node)}\n" for choice, comment, node in choices]
        for target in dict.fromkeys(str(node["_target_"]) for _, _, node in choices):
            parts.append(_target(target, key))
    return "".join(parts)


def _section(kind: type, prefix: str) -> Iterator[str]:
    """The settings of a section in one table, and those of each section in it in one of its own."""
    hints = get_type_hints(kind)
    own = [f for f in fields(kind) if not is_dataclass(hints[f.name])]
    if prefix:
        yield f"\n### {prefix.rstrip('.')}\n\n{_first_paragraph(kind.__doc__ or '')}\n\n"
    yield TABLE
    yield from (_row(f"{prefix}{f.name}", kind, f) for f in own)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from _section(hints[field.name], f"{prefix}{field.name}.")


def _row(key: str, kind: type, field: Field[Any]) -> str:
    hint = get_type_hints(kind)[field.name]
    is_node = hint in (Node, Node | None) and key in (*SINGLE, "reward")
    type_ = "node" if is_node else "nodes by name" if key in NAMED else _in_words(hint)
    default = default_of(field)
    shown = "" if default == MISSING or is_node else _value(default)
    return _cells(f"`{key}`", type_, shown, range_.words if (range_ := range_of(field)) else "", meaning_of(field))


def _target(target: str, key: str) -> str:
    """A target's settings, with the meanings that its docstring gives them."""
    definition = definition_of(target, key)
    signature = definition and definition.signature()
    if definition is None or signature is None:
        return ""
    injected = INJECTED.get(key, frozenset())
    own = {name: p for name, p in signature.parameters.items() if name not in injected}
    title = f"\n**`{target}`** {_first_paragraph(definition.docstring)}\n"
    if not own:
        return title
    meanings = _meanings(definition)
    rows = [_target_row(name, parameter, meanings.get(name, "")) for name, parameter in own.items()]
    return f"{title}\n{TABLE}{''.join(rows)}"


def _target_row(name: str, parameter: Parameter, meaning: str) -> str:
    annotation = "" if parameter.annotation is None else _plain(parameter.annotation)
    ranges = [] if parameter.annotation is None else range_of_annotation(parameter.annotation)
    default = "" if parameter.default is UNKNOWN else _value(parameter.default)
    meaning = meaning[:1].upper() + meaning[1:].replace("None", "null")
    return _cells(f"`{name}`", annotation, default, "; ".join(range_.words for range_ in ranges), meaning)


def _choices() -> dict[str, list[tuple[str, str, DictConfig]]]:
    """The choices of conf/ that fill each plug-in point, with their comment and their node."""
    found: dict[str, list[tuple[str, str, DictConfig]]] = {}
    for file in sorted(conf_dir().glob("*/*.yaml")):
        group = file.parent.name
        if group == "experiment":
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
        for path, node in _nodes(OmegaConf.load(file), ""):
            key = f"{group}{path}" if group != "reward" else "reward"
            found.setdefault(key, []).append((f"{group}={file.stem}", comment, node))
    return found


def _nodes(node: Any, path: str) -> Iterator[tuple[str, DictConfig]]:
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield path, node
        else:
            for name in node:
                if not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, str(name)):
                    yield from _nodes(node[name], f"{path}.{name}")


def _given(node: DictConfig) -> str:
    """The settings that a choice gives beside its target."""
    plain = as_dict(node, resolve=False)
    given = ", ".join(f"{name}={value}" for name, value in plain.items() if name != "_target_" and value != MISSING)
    return f"(`{given}`)" if given else ""


def _meanings(definition: Definition) -> dict[str, str]:
    """The meaning of each parameter by the docstring's Attributes or Args, its own or a base's."""
    found: dict[str, str] = {}
    for base in definition.bases():
        found |= _meanings(base) if base else {}
    names: list[str] = []
    inside = False
    for line in definition.docstring.splitlines():
        if match := re.match(r"(Attributes|Args):\s*(.*)$", line):
            inside, line = True, f"    {match.group(2)}"
        elif inside and line and not line.startswith(" "):
            inside = False
        if inside and (match := re.match(r"\s{4}(\w+(?:, \w+)*): (.*)$", line)):
            names = match.group(1).split(", ")
            found |= dict.fromkeys(names, match.group(2))
        elif inside and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _plain(annotation: ast.expr) -> str:
    """An annotation in words, without its ranges."""
    text = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", ast.unparse(annotation))
    return re.sub(r"Literal\[(.*?)\]", r"\1", text).replace("None", "null").replace("'", "")


def _in_words(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", None) else str(hint)
    return text.replace("typing.", "").replace("None", "null")


def _value(value: Any) -> str:
    """A value as YAML has it."""
    plain = list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
    return f"`{yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix(chr(10)).removesuffix('...').strip()}`"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n")[0].split())


def main() -> None:
    (Path(__file__).parents[2] / "docs" / "settings.md").write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
