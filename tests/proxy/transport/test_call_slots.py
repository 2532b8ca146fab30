from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm.transport.call_slots import CallSlots


class Calls:
    """Calls that hold their slots until they are ended by name, in the order of their starts."""

    def __init__(self, slots: CallSlots) -> None:
        self.slots = slots
        self.started: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._give_back: dict[str, Callable[[], None]] = {}

    async def begin(self, name: str, *, is_lead: bool, num: int = 1) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, is_lead, num))
        await settle()

    async def end_one(self, name: str) -> None:
        """End one of the siblings of a call."""
        self._give_back[name]()
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await settle()

    async def _run(self, name: str, is_lead: bool, num: int) -> None:
        async with self.slots.slot(is_lead=is_lead, num=num) as give_back:
            self.started.append(name)
            self._give_back[name] = give_back
            await self._ends[name].wait()


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_lead_that_came_later_gets_the_free_slot_before_a_waiting_sibling() -> None:
    calls = Calls(CallSlots(1))
    await calls.begin("first", is_lead=True)
    await calls.begin("sibling", is_lead=False)
    await calls.begin("lead", is_lead=True)
    await calls.end("first")
    assert calls.started == ["first", "lead"]
    await calls.end("lead")
    assert calls.started == ["first", "lead", "sibling"]


async def test_siblings_leave_a_quarter_of_the_slots_to_leads() -> None:
    calls = Calls(CallSlots(4))
    for number in range(5):
        await calls.begin(f"sibling {number}", is_lead=False)
    assert calls.started == ["sibling 0", "sibling 1", "sibling 2"]
    await calls.begin("lead", is_lead=True)
    assert calls.started[-1] == "lead"
    assert (calls.slots.num_open, calls.slots.num_waiting_siblings) == (4, 2)


async def test_a_call_that_is_cancelled_while_it_waits_leaves_its_place_to_the_next() -> None:
    calls = Calls(CallSlots(1))
    for name in ("first", "second", "third"):
        await calls.begin(name, is_lead=True)
    await calls.cancel("second")
    await calls.end("first")
    assert calls.started == ["first", "third"]
    await calls.end("third")
    assert calls.slots.num_open == 0


async def test_a_shared_call_waits_for_a_slot_per_sibling_and_gives_them_back_one_by_one() -> None:
    calls = Calls(CallSlots(8))
    assert calls.slots.max_per_call == 6
    await calls.begin("three", is_lead=False, num=3)
    await calls.begin("six", is_lead=False, num=6)
    await calls.begin("one", is_lead=False)
    assert calls.started == ["three"] and calls.slots.num_waiting_siblings == 7
    await calls.end_one("three")
    await calls.end_one("three")
    assert calls.started == ["three"] and calls.slots.num_open == 1
    await calls.end("three")
    assert calls.started == ["three", "six"] and calls.slots.num_open == 6
    await calls.cancel("six")
    assert calls.started[-1] == "one" and calls.slots.num_open == 1


async def test_a_call_that_needs_fewer_slots_starts_when_a_larger_one_before_it_is_cancelled() -> (
    None
):
    calls = Calls(CallSlots(4))
    await calls.begin("two", is_lead=False, num=2)
    await calls.begin("large", is_lead=False, num=3)
    await calls.begin("small", is_lead=False)
    await calls.cancel("large")
    assert calls.started == ["two", "small"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["lead", "sibling", "shared", "end", "end one", "cancel"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(st.integers(1, 5), ACTIONS)
@settings(max_examples=200)
def test_no_more_calls_than_slots_are_open_and_no_slot_is_lost(
    num_slots: int, actions: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        calls = Calls(CallSlots(num_slots))
        alive: list[str] = []
        for count, (action, number) in enumerate(actions):
            if action in ("lead", "sibling", "shared"):
                alive.append(f"{action} {count}")
                num = min(number + 1, calls.slots.max_per_call) if action == "shared" else 1
                await calls.begin(alive[-1], is_lead=action == "lead", num=num)
            elif action == "end one":
                for name in [name for name in alive if name in calls.started][:1]:
                    await calls.end_one(name)
            elif alive:
                running = [name for name in alive if name in calls.started]
                name = alive[number % len(alive)] if action == "cancel" else None
                name = name or (running[number % len(running)] if running else None)
                if name is not None:
                    alive.remove(name)
                    await (calls.cancel(name) if action == "cancel" else calls.end(name))
            is_waiting = bool(calls.slots.num_waiting_leads)
            assert calls.slots.num_open <= calls.slots.num_slots
            assert not is_waiting or calls.slots.num_open == calls.slots.num_slots
        for name in alive:
            await calls.cancel(name)
        assert calls.slots.num_open == 0

    asyncio.run(play())
