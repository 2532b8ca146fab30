"""One-line explanations of mistakes in fakevllm.toml and in flags. Each explanation names the key,
the problem and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from fakevllm.config.policy import SkipRule
from fakevllm.config.serving import RouteRules
from fakevllm_adapters.http.validation_messages import closest_name
from fakevllm_adapters.job.unused_settings import NEVER_USED

_FLAGS = {
    "swarm.url": "--swarm",
    "swarm.key": "--swarm-key",
    "hooks.path": "--hooks",
    "hooks.watch": "--watch-hooks",
    "models.aliases": "--alias",
    "dataset.file": "--dataset",
    "dataset.field": "--field",
    "fallback.url": "--fallback",
    "fallback.key": "--fallback-key",
    "serve.policy": "--serve-policy",
    "job.num_repeat": "--n",
    "job.lockstep": "--lockstep",
}
"""Flag of `fakevllm serve` for each configuration key whose flag has a different name. Any other
flag has the name of its key."""
_SECRETS = ("swarm.key", "fallback.key", "alerts.url")
"""Configuration keys whose values are secret and never appear in a message."""
_FIXES = {
    "tuple_type": 'write a list, such as ["..."]',
    "dict_type": 'write a table, such as {"..." = 4}',
    "bool_parsing": "write true or false",
    "bool_type": "write true or false",
}
"""For each pydantic error type whose message mentions Python types: the text that replaces this
message.
"""
_FOREIGN_NAMES = {
    "learning_rate": "lr",
    "group_size": "num_repeat",
    "num_generations": "num_repeat",
}
"""Maps setting names of other trainers to the names of the same settings in fakevllm."""


def explain(
    error: ValidationError, file: Path | None, flag_keys: Set[str], model: type[BaseModel]
) -> str:
    """Return a message of one line that describes one problem in `error` and names the fix. An
    unknown key takes precedence over other problems.

    `flag_keys` are the configuration keys whose values come from flags. `model` is the class of the
    whole configuration.
    """
    problems = error.errors(include_url=False)
    # An unknown key comes first: it is often the misspelt name of a key that is reported missing.
    unknown_keys = (entry for entry in problems if entry["type"] == "extra_forbidden")
    problem = next(unknown_keys, problems[0])
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    source = file if file is not None else "the flags"
    if problem["type"] == "extra_forbidden":
        return f"Unknown key `{where}` in {source}: {_fix_for_unknown_key(problem['loc'], model)}."
    if problem["type"] == "model_type" or (where, problem["type"]) == ("policy.skip", "tuple_type"):
        head = "[[policy.skip]]" if where.startswith("policy.skip") else f"[{where}]"
        return f"`{where}` in {source} is a section: write {head} and its keys below it."
    text = _FIXES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    if not where:  # a conflict between sections
        return f"{source}: {text}."
    value = "" if where in _SECRETS else _quoted_value(problem["input"])
    key = ".".join(map(str, problem["loc"][:2]))  # for an entry of a list, the list's key
    if key in flag_keys:
        return f"`{_flag(key)}` (`{where}`): {text}{value}."
    return f"`{where}` in {source}: {text}{value}."


def _flag(key: str) -> str:
    """Return the flag that sets a configuration key.

    >>> _flag("job.num_repeat"), _flag("proxy.run_dir")
    ('--n', '--run-dir')
    """
    return _FLAGS.get(key) or "--" + key.partition(".")[2].replace("_", "-")


def _quoted_value(value: object) -> str:
    """Return the wrong value as text for an error message. Return "" if the value is a table, or an
    address that may contain a password."""
    if isinstance(value, Mapping | BaseModel) or "@" in str(value):
        return ""
    return f" (got {value!r})"


def _fix_for_unknown_key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return the part of an error message that says how to fix an unknown key. If the key belongs
    in a section, the text names the section. If there is a known key with a similar name, the text
    names this key. Otherwise the text lists all known keys."""
    *path, name = location
    known = _known_keys(model, tuple(path))
    if not path:
        homes = [f"[{section}]" for section in known if name in _known_keys(model, (section,))]
        if homes:
            return f"it belongs below {' or '.join(homes)}"
    meant = _FOREIGN_NAMES.get(str(name))
    if meant not in known:
        unused = NEVER_USED if path == ["job"] else ()
        meant = closest_name(str(name), known, unused)
    if meant is not None:
        return f"take it out, or write {meant}"
    return f"the known keys are {', '.join(known)}"


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    if path[:2] == ("policy", "skip"):
        return list(SkipRule.model_fields)
    if path[:2] == ("serve", "routes"):
        return list(RouteRules.model_fields)
    for part in path:
        model = cast(type[BaseModel], model.model_fields[str(part)].annotation)
    return list(getattr(model, "model_fields", ()))  # the table [server] is a plain dict
