"""The results of hooks, and the checks of the values that hooks return. This module does no I/O.

A failure has a reason. A reason is a text with a stable slug, a colon and a detail, such as
`hook_raised: ValueError: bad (mine.py:12)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, cast

import orjson

from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE, MAX_REWARD

Json = dict[str, Any]

_APP_FIELDS = frozenset(
    {"n", "stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo"}
)
"""Request fields that a hook must not change. They determine the form of the answer. The app may
get the answer of any sibling (sampled answer), so all siblings must have the form that the app
requested."""
_AS_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class HookReason(StrEnum):
    """Reasons why a hook call gave no usable result. Each value is a slug, with which
    `HookFailure.reason` begins."""

    RAISED = "hook_raised"
    """The hook raised an exception. The detail names the line in the user's file."""
    TIMEOUT = "hook_timeout"
    """The hook did not return within `hooks.timeout_s`."""
    LENGTH = "hook_length"
    """The number of results differs from the number of siblings. `on_compute_relative_reward` must
    return one reward per sibling."""
    TYPE = "hook_type"
    """A result has a wrong type. A reward must be a number or None. `on_user_submit_new_requests`
    must return None, an int or a list of dicts."""
    VALUE = "hook_value"
    """A result has a value that is not allowed, such as a reward below -1e9 or above 1e9."""
    NAN = "hook_nan"
    """A reward or value is not finite."""
    OVERRIDE = "hook_override"
    """The engine refuses what `on_user_submit_new_requests` changed for a sibling. The group
    continues without that sibling, so this reason is only in the log."""
    CRASHED = "hook_crashed"
    """The hook process ended."""
    CLOSED = "hook_closed"
    """The proxy was stopping."""
    LOAD = "hook_load"
    """The hooks could not be imported when the process was started again."""
    INPUT = "hook_input"
    """The arguments of the hook could not be sent to its process."""


_HOOK_REASONS = frozenset(HookReason)


def hook_reason(recorded: str | None) -> HookReason | None:
    """Return the kind of hook failure that `recorded` describes. `recorded` is a reason from the
    ledger, the proxy's database. Return None if the reason does not describe the failure of a hook.

    >>> hook_reason("hook_nan: reward 1 is nan"), hook_reason("tied")
    (<HookReason.NAN: 'hook_nan'>, None)
    """
    slug = (recorded or "").partition(":")[0]
    return HookReason(slug) if slug in _HOOK_REASONS else None


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    """The result of the hook on_user_submit_new_requests. `num` is the number of siblings (answers
    to sample). `overrides` has the request fields that each sibling changes. If both are None, the
    configured number of siblings is sampled.

    >>> SubmitPlan(overrides=[{}, {"temperature": 1.2}]).overrides
    [{}, {'temperature': 1.2}]
    """

    num: int | None = None
    overrides: list[Json] | None = None


@dataclass(frozen=True, slots=True)
class HookFailure:
    """The outcome of a hook call that gave no usable result."""

    reason: str


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """The result of the hook on_compute_relative_reward.

    >>> RewardOutcome([1.0, None], None, [{}, {}]).rewards
    [1.0, None]
    """

    rewards: list[float | None] | None
    reason: str | None
    """Reason why there are no rewards; None if there are rewards."""
    annotations: list[Json] = field(default_factory=list[Json])
    """For each answer, the keys that the hook added to or changed in the answer's dict, with their
    values."""
    hook_hash: str = ""


@dataclass(frozen=True, slots=True)
class FeedbackValue:
    """The result of the hook on_feedback. If the value is None, the feedback has no effect.

    >>> FeedbackValue(0.5).value
    0.5
    """

    value: float | None
    hook_hash: str = ""


def read_plan(value: object) -> SubmitPlan | HookFailure:
    """Check the value that the hook on_user_submit_new_requests returned. Return it as a
    SubmitPlan, or return a HookFailure if the value is not valid.

    >>> read_plan(8), read_plan(True).reason
    (SubmitPlan(num=8, overrides=None), 'hook_type: got bool, want None, an int or a list')
    """
    if value is None:
        return SubmitPlan()
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            return HookFailure(f"hook_value: got {value}, want at least 1")
        if value > MAX_GROUP_SIZE:
            return HookFailure(f"hook_value: got {value}, want at most {MAX_GROUP_SIZE}")
        return SubmitPlan(num=value)
    if not isinstance(value, list):
        return HookFailure(f"hook_type: got {type(value).__name__}, want None, an int or a list")
    items = cast(list[Any], value)
    if not items:
        return HookFailure("hook_value: got an empty list, want one dict per sibling")
    if len(items) > MAX_GROUP_SIZE:
        return HookFailure(f"hook_value: got {len(items)} dicts, want at most {MAX_GROUP_SIZE}")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            return HookFailure(f"hook_type: item {index} is {type(item).__name__}, want a dict")
    if items[0]:
        return HookFailure("hook_value: item 0 must be {}, the lead carries the app's own request")
    for index, item in enumerate(items):
        if fields := sorted(_APP_FIELDS.intersection(item)):
            return HookFailure(f"hook_value: item {index} sets {fields[0]}, which is the app's own")
    try:
        return SubmitPlan(overrides=orjson.loads(orjson.dumps(items)))
    except TypeError as error:
        return HookFailure(f"hook_type: the overrides are not JSON: {error}")


def read_rewards(value: object, num: int) -> list[float | None] | HookFailure:
    """Check the value that the hook on_compute_relative_reward returned for `num` answers. Return
    the rewards, or a HookFailure if the value is not valid.

    >>> read_rewards([1, None, True], 3), read_rewards([0.5], 2).reason
    ([1.0, None, 1.0], 'hook_length: got 1, want 2')
    """
    if not isinstance(value, list | tuple):
        return HookFailure(f"hook_type: got {type(value).__name__}, want a list")
    length = len(cast(Sequence[Any], value))
    # the iterator of a list subclass may yield more items than `len` says, even without an end
    items = list(islice(cast(Sequence[Any], value), num + 1))
    if length != num or len(items) != num:
        got = length if length != num else len(items)
        return HookFailure(f"hook_length: got {got}, want {num}")
    rewards: list[float | None] = []
    for index, item in enumerate(items):
        reward = None if item is None else _number(item)
        if item is not None and reward is None:
            kind = type(item).__name__
            return HookFailure(f"hook_type: reward {index} is {kind}, want a number or None")
        if reward is not None and not math.isfinite(reward):
            return HookFailure(f"hook_nan: reward {index} is {reward}")
        if reward is not None and abs(reward) > MAX_REWARD:
            return HookFailure(f"hook_value: reward {index} is {reward:g}, beyond {MAX_REWARD:g}")
        rewards.append(reward)
    return rewards


def read_value(value: object) -> float | HookFailure | None:
    """Check the value that the hook on_feedback returned. Return the value as a float, or None if
    the hook returned None. Return a HookFailure if the value is not valid.

    >>> read_value(None), read_value(True), read_value("up").reason
    (None, 1.0, 'hook_type: got str, want a number or None')
    """
    number = None if value is None else _number(value)
    if value is not None and number is None:
        return HookFailure(f"hook_type: got {type(value).__name__}, want a number or None")
    if number is not None and not math.isfinite(number):
        return HookFailure(f"hook_nan: got {number}")
    if number is not None and abs(number) > MAX_REWARD:
        return HookFailure(f"hook_value: got {number:g}, beyond {MAX_REWARD:g}")
    return number


def changed_keys(before: Json, after: Json) -> Json:
    """Return the entries that a hook added to a dict or changed in it. `before` and `after` are
    copies of the dict from before and after the hook ran. Values that JSON cannot express are left
    out.

    >>> changed_keys({"content": "a"}, {"content": "a", "score": 3, "model": object()})
    {'score': 3}
    """
    changes: Json = {}
    for key, value in after.items():
        if key in before and _same(before[key], value):
            continue
        try:
            changes |= orjson.loads(orjson.dumps({key: value}, option=_AS_JSON))
        except TypeError:
            continue
    return changes


def valid_utf8(text: str) -> str:
    """Return the text with surrogate characters replaced by escape sequences. Neither JSON nor the
    ledger (the proxy's database) can store surrogates.

    >>> valid_utf8("a" + chr(0xD800))
    'a\\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _number(item: Any) -> float | None:
    if isinstance(item, str | bytes | bytearray):
        return None
    try:
        return float(item)
    except Exception:  # isolates: a user's object may raise anything
        return None


def _same(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except BaseException:  # isolates: arrays and users' objects may refuse to be compared
        return False
