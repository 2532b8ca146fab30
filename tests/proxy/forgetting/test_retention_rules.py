"""Which groups are pruned, and which never are."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm.forgetting.retention_rules import (
    BYTES_PER_MB,
    DAY_S,
    SHARE_KEPT,
    Moment,
    RetentionRules,
)
from fakevllm.ledger.records import State
from fakevllm.ledger.stored_groups import StoredGroup
from fakevllm_adapters.privacy.settings import PrivacySettings

NOW = 100 * DAY_S
OPEN = "gate-7"
DAYS = st.none() | st.floats(0.001, 120)
MEGABYTES = st.none() | st.floats(0.0001, 0.05)


@st.composite
def groups(draw: st.DrawFn) -> list[StoredGroup]:
    times = sorted(draw(st.lists(st.floats(0, NOW + DAY_S), max_size=12)))
    return [
        StoredGroup(
            f"g{number}",
            received_at,
            num_bytes=draw(st.integers(0, 5_000)),
            state=draw(st.sampled_from([state.value for state in State])),
            eval_id=draw(st.sampled_from([None, OPEN, "gate-6", "mine"])),
            has_open_feedback=draw(st.booleans()),
            kept_until=draw(st.none() | st.floats(0, 2 * NOW)),
        )
        for number, received_at in enumerate(times)
    ]


def must_stay(group: StoredGroup) -> bool:
    """State what must never be pruned, independently of the code."""
    return (
        group.state in ("scored", "pooled")
        or group.has_open_feedback
        or (group.kept_until is not None and group.kept_until > NOW)
        or group.eval_id == OPEN
    )


def rules(days: float | None = None, megabytes: float | None = None) -> RetentionRules:
    return RetentionRules(PrivacySettings(retention_days=days, max_ledger_mb=megabytes))


def moment(num_bytes: int) -> Moment:
    return Moment(NOW, num_bytes, {OPEN})


@given(groups(), DAYS, MEGABYTES, st.integers(0, 60_000), st.integers(0, 15))
def test_nothing_is_chosen_that_is_needed_or_allowed_to_stay(
    stored: list[StoredGroup],
    days: float | None,
    megabytes: float | None,
    num_bytes: int,
    limit: int,
) -> None:
    chosen = rules(days, megabytes).choose(stored, moment(num_bytes), limit)
    by_id = {group.group_id: group for group in stored}
    assert len(chosen) == len(set(chosen)) <= limit
    assert not any(must_stay(by_id[one]) for one in chosen)
    is_too_large = megabytes is not None and num_bytes > megabytes * BYTES_PER_MB
    if not is_too_large:
        oldest_kept = float("-inf") if days is None else NOW - days * DAY_S
        assert all(by_id[one].received_at < oldest_kept for one in chosen)
    # The oldest go first: whatever is older than a chosen group is needed, or chosen too.
    if chosen:
        older = stored[: stored.index(by_id[chosen[-1]])]
        assert all(must_stay(one) or one.group_id in chosen for one in older)


@given(groups(), DAYS, MEGABYTES, st.integers(0, 60_000))
def test_whatever_is_too_old_is_chosen(
    stored: list[StoredGroup], days: float | None, megabytes: float | None, num_bytes: int
) -> None:
    assume(days is not None)
    assert days is not None
    chosen = set(rules(days, megabytes).choose(stored, moment(num_bytes), 100))
    old = {one.group_id for one in stored if one.received_at < NOW - days * DAY_S}
    assert old - chosen == {one.group_id for one in stored if must_stay(one)} & old


@given(groups(), MEGABYTES, st.integers(0, 60_000))
def test_a_ledger_that_is_too_large_gets_below_the_limit_or_keeps_only_what_is_needed(
    stored: list[StoredGroup], megabytes: float | None, num_bytes: int
) -> None:
    assume(megabytes is not None)
    assert megabytes is not None
    chosen = rules(None, megabytes).choose(stored, moment(num_bytes), 100)
    freed = sum(one.num_bytes for one in stored if one.group_id in chosen)
    if num_bytes <= megabytes * BYTES_PER_MB:
        assert chosen == []
    elif num_bytes - freed > megabytes * BYTES_PER_MB * SHARE_KEPT:
        assert all(must_stay(one) or one.group_id in chosen for one in stored)
    else:
        last = next(one for one in stored if one.group_id == chosen[-1])
        assert num_bytes - freed + last.num_bytes > megabytes * BYTES_PER_MB * SHARE_KEPT


@given(groups(), st.integers(0, 10**12))
def test_without_settings_everything_is_kept(stored: list[StoredGroup], num_bytes: int) -> None:
    assert not rules().are_set
    assert rules().choose(stored, moment(num_bytes), 100) == []


@given(DAYS, DAYS, MEGABYTES, MEGABYTES)
def test_of_two_settings_the_stricter_one_holds(
    days: float | None, other_days: float | None, size: float | None, other_size: float | None
) -> None:
    first = PrivacySettings(retention_days=days, max_journal_mb=size)
    both = first.union(PrivacySettings(retention_days=other_days, max_journal_mb=other_size))
    for value, one, other in (
        (both.retention_days, days, other_days),
        (both.max_journal_mb, size, other_size),
    ):
        known = [number for number in (one, other) if number is not None]
        assert value == (min(known) if known else None)
    assert first.union(PrivacySettings()) == first


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "soon"])
def test_a_limit_that_is_no_positive_number_is_refused(value: object) -> None:
    for name in ("retention_days", "max_ledger_mb", "max_journal_mb"):
        with pytest.raises(ValidationError):
            PrivacySettings.model_validate({name: value})
