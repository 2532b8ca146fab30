"""The router keeps sessions and groups on one replica, and sends no call to a replica that is
out."""

from __future__ import annotations

from collections import Counter
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.fleet.router import (
    CallAffinity,
    ReplicaState,
    ReplicaView,
    Router,
)

SERVING: Final = ReplicaView(ReplicaState.SERVING)
NAMES = [f"replica-{number}" for number in range(4)]
VIEWS = st.builds(
    ReplicaView, st.sampled_from(list(ReplicaState)), st.integers(0, 9), st.just(frozenset[str]())
)
FLEETS = st.dictionaries(st.sampled_from(NAMES), VIEWS, min_size=1)
KEYS = st.none() | st.text(max_size=8)
CALLS = st.builds(CallAffinity, KEYS, KEYS)


def fleet(*loads: int) -> dict[str, ReplicaView]:
    """Return serving replicas with these numbers of running calls."""
    views = [ReplicaView(ReplicaState.SERVING, load) for load in loads]
    return dict(zip(NAMES, views, strict=False))


def in_state(state: ReplicaState) -> ReplicaView:
    return ReplicaView(state)


@given(FLEETS, st.lists(CALLS, min_size=1), st.none() | st.sampled_from(NAMES))
def test_a_call_never_goes_to_a_replica_that_is_being_started(
    replicas: dict[str, ReplicaView], calls: list[CallAffinity], failed: str | None
) -> None:
    router = Router()
    for call in calls:
        name = router.choose(call, replicas, failed)
        running = {each for each, view in replicas.items() if view.state != ReplicaState.STARTING}
        assert (name is None) == (not running)
        assert name is None or name in running


@given(FLEETS, CALLS)
def test_a_new_call_goes_to_a_serving_replica_if_there_is_one(
    replicas: dict[str, ReplicaView], call: CallAffinity
) -> None:
    serving = {n: view for n, view in replicas.items() if view.state is ReplicaState.SERVING}
    name = Router().choose(call, replicas)
    if serving:
        assert name in serving
        fewest = min(view.num_running for view in serving.values())
        assert serving[name].num_running == fewest


@given(CALLS, st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1))
def test_calls_of_a_session_or_a_group_stay_on_one_replica_whatever_the_loads(
    call: CallAffinity, loads: list[tuple[int, ...]]
) -> None:
    router = Router()
    chosen = {router.choose(call, fleet(*each)) for each in loads}
    assert len(chosen) == 1 or (call.session is None and call.group is None)


@given(st.lists(FLEETS, min_size=1), CALLS, st.text(max_size=8))
def test_a_group_leaves_its_replica_only_if_the_replica_neither_serves_nor_drains(
    fleets: list[dict[str, ReplicaView]], call: CallAffinity, group: str
) -> None:
    router, home = Router(), None
    for replicas in fleets:
        name = router.choose(CallAffinity(call.session, group), replicas)
        view = None if home is None else replicas.get(home)
        if view is not None and view.state in (ReplicaState.SERVING, ReplicaState.DRAINING):
            assert name == home
        home = home if name is None else name


@given(st.text(), st.sampled_from(NAMES))
def test_a_second_attempt_goes_to_another_replica(session: str, failed: str) -> None:
    router, call = Router(), CallAffinity(session)
    assert router.choose(call, dict.fromkeys(NAMES, SERVING), failed) != failed
    assert router.choose(call, {failed: SERVING}, failed) == failed


@given(st.sets(st.text(), min_size=1), st.sampled_from(NAMES))
def test_if_a_replica_dies_only_its_own_sessions_move(sessions: set[str], dead: str) -> None:
    router = Router()
    all_serve = dict.fromkeys(NAMES, SERVING)
    before = {each: router.choose(CallAffinity(each), all_serve) for each in sessions}
    left = all_serve | {dead: in_state(ReplicaState.STARTING)}
    after = {each: router.choose(CallAffinity(each), left) for each in sessions}
    assert dead not in after.values()
    moved = {each for each in sessions if before[each] != after[each]}
    assert moved == {each for each in sessions if before[each] == dead}


@given(st.lists(st.text(min_size=1), min_size=1, unique=True))
def test_a_router_that_has_forgotten_the_sessions_chooses_equally_among_equal_loads(
    sessions: list[str],
) -> None:
    replicas = dict.fromkeys(NAMES, SERVING)
    first, second = Router(), Router(max_sessions=1)
    for each in sessions:
        call = CallAffinity(each)
        assert first.choose(call, replicas) == second.choose(call, replicas)


def test_a_draining_replica_gets_only_calls_of_groups_that_it_has_begun() -> None:
    router = Router()
    begun = CallAffinity("session", "begun")
    home = router.choose(begun, fleet(0, 0))
    assert home is not None
    draining = fleet(9, 9) | {home: in_state(ReplicaState.DRAINING)}
    assert router.choose(begun, draining) == home
    assert router.choose(CallAffinity("session", "next"), draining) != home
    assert router.choose(CallAffinity("other"), draining) != home


def test_a_session_returns_to_its_replica_after_new_weights() -> None:
    router, call = Router(), CallAffinity("session")
    home = router.choose(call, fleet(0, 0))
    assert home is not None
    assert router.choose(call, fleet(0, 0) | {home: in_state(ReplicaState.LOADING)}) != home
    assert router.choose(call, fleet(9, 9)) == home


def test_a_call_for_a_policy_goes_to_a_replica_that_holds_the_policy() -> None:
    holder = ReplicaView(ReplicaState.SERVING, 9, frozenset({"policy-3"}))
    replicas = fleet(0, 0, 0) | {NAMES[3]: holder}
    call = CallAffinity("session", policy="policy-3")
    assert Router().choose(call, replicas) == NAMES[3]
    assert Router().choose(CallAffinity("session"), replicas) != NAMES[3]


def test_sessions_are_spread_evenly_among_equal_loads() -> None:
    router = Router()
    chosen = Counter(router.choose(CallAffinity(f"s{n}"), fleet(0, 0, 0)) for n in range(3000))
    assert min(chosen.values()) > 900


def test_the_router_remembers_a_bounded_number_of_sessions_and_groups() -> None:
    router = Router(max_sessions=2, max_groups=2)
    names = [router.choose(CallAffinity(f"s{n}", f"g{n}"), fleet(n, 9 - n)) for n in range(10)]
    assert names[0] == NAMES[0] and names[-1] == NAMES[1]
    # The last two are remembered, whatever the loads are. The first is chosen anew.
    assert router.choose(CallAffinity("s9"), fleet(0, 9)) == NAMES[1]
    assert router.choose(CallAffinity("s0"), fleet(9, 0)) == NAMES[1]
