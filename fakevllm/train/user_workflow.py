"""Load functions from the user's Python files, and check what a workflow returns.

A workflow is a function with the arguments (task, access). It runs one episode and returns the
episode's reward. `access` has the URL and the API key for the episode's model calls.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fakevllm.errors import ConfigError, UserError
from fakevllm_adapters.protocol.swarm import MAX_REWARD, WorkflowOutput


def load_function(spec: str, folder: Path) -> Callable[..., Any]:
    """Return the function that `spec` names, written as `FILE.py:FUNCTION`. The file's path is
    relative to `folder`.

    Raises ConfigError if the file cannot be imported, or has no such function.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{spec!r} names no function: write the file and the function, as in agent.py:run."
        )
    module = _import_file(folder / path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [member for member in vars(module) if _is_public_function(module, member)]
        available = f"it has {', '.join(names)}" if names else "it has no function"
        raise ConfigError(f"{folder / path} has no function {name!r}: {available}.")
    return cast(Callable[..., Any], function)


def load_workflow(spec: str, folder: Path) -> Callable[..., Any]:
    """Return the workflow that `spec` names. A workflow is the function that runs one episode, and
    `spec` has the form `FILE.py:FUNCTION`. The file's path is relative to `folder`.

    Raises ConfigError if the function cannot be loaded, or if it does not accept the two arguments
    task and access.
    """
    function = load_function(spec, folder)
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spec} cannot be called as run(task, access): {error}.") from None
    return function


def parse_workflow_output(returned: object, workflow_name: str) -> WorkflowOutput:
    """Return a workflow's result as a WorkflowOutput with a single finite reward.

    The result may be a WorkflowOutput or a number. A number is the reward. Raises UserError for any
    other result. After this error, the episode is not retried, because the workflow would return
    the same result again.
    """
    output = returned
    if isinstance(returned, int | float) and abs(returned) <= MAX_REWARD:
        output = WorkflowOutput(reward=float(returned))
    if isinstance(output, WorkflowOutput) and isinstance(output.reward, int | float):
        return output
    shown = repr(returned)[:80]
    raise UserError(
        f"{workflow_name} returned {shown}: return the reward, one finite number up to "
        f"{MAX_REWARD:g}, or a fakevllm.WorkflowOutput with such a reward."
    )


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error as one text, without a final full stop.

    >>> describe_error(ValueError("bad row."))
    'ValueError: bad row'
    """
    return f"{type(error).__name__}: {error}".rstrip(": .")


def _import_file(file: Path) -> ModuleType:
    """Import a Python file and return its module. If the file was imported before, return the
    existing module. The file's folder is added to `sys.path`, so that the file can import other
    modules in this folder.

    Raises ConfigError if the file does not exist or cannot be imported.
    """
    file = file.resolve()
    name = f"fakevllm_train_{file.stem}"
    imported = sys.modules.get(name)
    if imported is not None and imported.__file__ == str(file):
        return imported
    if not file.is_file():
        raise ConfigError(
            f"There is no file {file}: write its path relative to the folder of the YAML file."
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # translated: the module is the user's code
        raise ConfigError(f"{file} cannot be imported: {describe_error(error)}.") from error
    return module


def _is_public_function(module: ModuleType, name: str) -> bool:
    """Return True if `name` is a public callable that this module defines. Callables that the
    module only imports do not count."""
    value = getattr(module, name)
    is_own = getattr(value, "__module__", None) == module.__name__
    return callable(value) and is_own and not name.startswith("_")
