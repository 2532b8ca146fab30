"""A mistake in fakevllm.toml or a flag, in one line: where, what, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from fakevllm.config.policy import SkipRule
from fakevllm.config.serving import RouteRules
from fakevllm_adapters.http.validation_messages import closest_name

_FLAGS = {
    "swarm.url": "--swarm",
    "swarm.key": "--swarm-key",
    "hooks.path": "--hooks",
    "models.aliases": "--alias",
    "dataset.file": "--dataset",
    "dataset.field": "--field",
    "fallback.url": "--fallback",
    "fallback.key": "--fallback-key",
    "serve.policy": "--serve-policy",
    "job.num_repeat": "--n",
    "job.lockstep": "--lockstep",
}
"""Of `fakevllm serve`. Those of `proxy` are called as their keys."""
_SECRETS = ("swarm.key", "fallback.key")
"""Shown by no message."""
_TO_WRITE = {
    "tuple_type": 'write a list, such as ["..."]',
    "dict_type": 'write a table, such as {"..." = 4}',
    "bool_parsing": "write true or false",
    "bool_type": "write true or false",
}
"""Where pydantic's words are Python's."""
_ELSEWHERE = {"learning_rate": "lr", "group_size": "num_repeat", "num_generations": "num_repeat"}
"""What other trainers call it."""


def explained(
    error: ValidationError, file: Path | None, by_flag: Set[str], model: type[BaseModel]
) -> str:
    """The first problem, with what would be right. `by_flag`: keys that were given by one."""
    problems = error.errors(include_url=False)
    # A key that is missing is often there, misspelt.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    source = file if file is not None else "the flags"
    if problem["type"] == "extra_forbidden":
        return f"Unknown key `{where}` in {source}: {_instead_of(problem['loc'], model)}."
    if problem["type"] == "model_type" or (where, problem["type"]) == ("policy.skip", "tuple_type"):
        head = "[[policy.skip]]" if where.startswith("policy.skip") else f"[{where}]"
        return f"`{where}` in {source} is a section: write {head} and its keys below it."
    said = _TO_WRITE.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    if not where:  # of sections that do not fit together
        return f"{source}: {said}."
    got = "" if where in _SECRETS else _got(problem["input"])
    key = ".".join(map(str, problem["loc"][:2]))  # of the list that an entry is in
    if key in by_flag:
        return f"`{_flag(key)}` (`{where}`): {said}{got}."
    return f"`{where}` in {source}: {said}{got}."


def _flag(key: str) -> str:
    """
    >>> _flag("job.num_repeat"), _flag("proxy.run_dir")
    ('--n', '--run-dir')
    """
    return _FLAGS.get(key) or "--" + key.partition(".")[2].replace("_", "-")


def _got(value: object) -> str:
    """Not a table, of which the message names the key, nor a password in an address."""
    if isinstance(value, Mapping | BaseModel) or "@" in str(value):
        return ""
    return f" (got {value!r})"


def _instead_of(place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Of a key that is none: where it belongs, what is spelt nearly so, or else all there are."""
    *path, name = place
    known = _known_keys(model, tuple(path))
    if not path:
        homes = [f"[{one}]" for one in known if name in _known_keys(model, (one,))]
        if homes:
            return f"it belongs below {' or '.join(homes)}"
    meant = _ELSEWHERE.get(str(name))
    if meant not in known:
        meant = closest_name(str(name), known)
    if meant is not None:
        return f"take it out, or write {meant}"
    return f"known here are {', '.join(known)}"


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    if path[:2] == ("policy", "skip"):
        return list(SkipRule.model_fields)
    if path[:2] == ("serve", "routes"):
        return list(RouteRules.model_fields)
    for part in path:
        model = cast(type[BaseModel], model.model_fields[str(part)].annotation)
    return list(model.model_fields)
