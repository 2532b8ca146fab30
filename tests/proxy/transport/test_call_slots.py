from __future__ import annotations

import asyncio
import contextlib

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

    async def begin(self, name: str, *, is_lead: bool) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, is_lead))
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

    async def _run(self, name: str, is_lead: bool) -> None:
        async with self.slots.slot(is_lead=is_lead):
            self.started.append(name)
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


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["lead", "sibling", "end", "cancel"]), st.integers(0, 9)),
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
            if action in ("lead", "sibling"):
                alive.append(f"{action} {count}")
                await calls.begin(alive[-1], is_lead=action == "lead")
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
