"""Finds what the file names: functions in Python files, and datasets."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm.sdk.readers import CsvReader, JsonlReader
from fakevllm_adapters.protocol.swarm import Task


def function(spec: str, folder: Path) -> Callable[..., Any]:
    """`agent.py:run`, in a file of that folder. Raises ConfigError."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{spec!r} names no function: write a file and its name, as agent.py:run."
        )
    module = _module(folder / path)
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key in vars(module) if _is_own_function(module, key)]
        known = f"it has {', '.join(own)}" if own else "it has no function"
        raise ConfigError(f"{folder / path} has no function {name!r}: {known}.")
    return cast(Callable[..., Any], found)


def workflow(spec: str, folder: Path) -> Callable[..., Any]:
    """One that takes a task and its access. Raises ConfigError."""
    found = function(spec, folder)
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spec} cannot be called as run(task, access): {error}.") from None
    return found


def tasks(spec: str, field: str, folder: Path) -> list[Task]:
    """A file's rows, or what a function makes. Raises ConfigError."""
    if ".py:" in spec:
        made = _made(spec, function(spec, folder))
    elif spec.endswith(".csv"):
        made = list(CsvReader(folder / spec, field))
    else:
        made = list(JsonlReader(folder / spec, field))
    if not made:
        raise ConfigError(f"The dataset {spec} has no row.")
    _check_ids(spec, made)
    return made


def _made(spec: str, make: Callable[[], Any]) -> list[Task]:
    try:
        made: Iterable[Any] = make()
        listed = list(made)
    except ConfigError:
        raise
    except Exception as error:  # translated: it is the user's code
        raise ConfigError(f"{spec} raised {_told(error)}.") from error
    if not all(isinstance(task, Task) for task in listed):
        raise ConfigError(f"{spec} must make tasks: return a reader, or a list of fakevllm.Task.")
    return cast(list[Task], listed)


def _check_ids(spec: str, made: list[Task]) -> None:
    """Episodes of one id are compared with each other."""
    seen: set[str] = set()
    for task in made:
        if not task.task_id or task.task_id in seen:
            raise ConfigError(
                f"{spec} has two tasks with the task_id {task.task_id!r}: give each its own."
                if task.task_id
                else f"{spec} has a task without task_id: give each its own."
            )
        seen.add(task.task_id)


def _module(file: Path) -> ModuleType:
    """Imported once. Its folder is on the path, for modules beside it."""
    file = file.resolve()
    name = f"fakevllm_train_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    if not file.is_file():
        raise ConfigError(f"There is no file {file}: name it as it lies beside the YAML file.")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # translated: it is the user's code
        raise ConfigError(f"{file} cannot be imported: {_told(error)}.") from error
    return module


def _is_own_function(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    is_own = getattr(value, "__module__", None) == module.__name__
    return callable(value) and is_own and not name.startswith("_")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")
