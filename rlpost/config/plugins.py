"""A user's function, by import path or file."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpost.errors import UserError


def split_path(path: str, key: str) -> tuple[str, str]:
    """("package.module" or "path/to/file.py", "function") from "package.module:function", "package.module.function" or
    "path/to/file.py:function".

    Raises: UserError naming `key` where it is none of these.
    """
    module, _, function = path.rpartition(":" if ":" in path else ".")
    if not module or not function.isidentifier():
        raise UserError(f"{key}={path}: expected package.module:function, or path/to/file.py:function")
    return module, function


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that a path (see `split_path`) names.

    Raises: UserError naming `key` where the module or the function is not there.
    """
    module_name, name = split_path(path, key)
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ImportError, FileNotFoundError) as error:
        raise UserError(f"{key}={path}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key}={path}: {module_name} has no function {name!r}")
    return function


def _from_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no such file (relative paths start at {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"rlpost_user_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
