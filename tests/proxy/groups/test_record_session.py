"""The record of a group contains its place, and the session tree knows its served answer."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import pytest

from fakevllm.admission.admission_rules import ServeOnly, ServeOnlyReason
from fakevllm.groups.group_record import GroupDraft
from fakevllm.sessions.client_session_ids import NO_HINTS
from fakevllm.sessions.conversation_matching import LookupResult
from fakevllm.sessions.request_placement import Placement
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import Evidence, IncomingRequest, Kind, Place
from fakevllm.transport.engine_client import EngineResponse
from fakevllm.transport.request import Request
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.groups.group_rig import WHOLE, answer_of, staged, text_of

Json = dict[str, Any]
HI = {"role": "user", "content": "hi"}


def placement(tree: SessionTree, group_id: str, *messages: Json) -> Placement:
    return Placement(tree, group_id, "", {"messages": list(messages)}, "", NO_HINTS, 1000.0)


def place_after(tree: SessionTree, answer: str) -> Place:
    """Return the place of the app's next request after an answer to "hi"."""
    messages = (HI, {"role": "assistant", "content": answer}, {"role": "user", "content": "so?"})
    place = placement(tree, "next", *messages).place(is_side=False)
    assert place is not None
    return place


def draft_of(a_placement: Placement, **request: Any) -> GroupDraft:
    adapter = ADAPTERS["chat"]
    raw = orjson.dumps(a_placement.body)
    exchange = adapter.open(a_placement.body, EngineInfo())
    app_request = Request(a_placement.group_id, adapter, raw, raw, exchange, {}, **request)
    return GroupDraft(app_request, Task(), "", None, placement=a_placement)


@pytest.mark.parametrize("policy", ["best", "lead"])
async def test_the_served_answer_is_known_before_the_group_ends(policy: str) -> None:
    tree = SessionTree()
    rules: dict[str, Any] = {"quorum": 2} if policy == "best" else {}
    own = placement(tree, "r1", HI)
    async with staged(3, streamed=True, placement=own, policy=policy, **rules) as stage:
        await stage.act(0, "answers")
        if policy == "best":
            await stage.act(2, "answers")
            await stage.score(0.0, 1.0)
        assert stage.is_answered and not stage.records
        served = text_of(2 if policy == "best" else 0)
        place = place_after(tree, served)
    assert (place.parent_id, place.turn, place.kind) == ("r1", 2, Kind.CONTINUES)
    record = stage.record
    assert (record.session_id, record.turn, record.kind) == (place.session_id, 1, "new")
    assert (record.evidence, record.parent_id) == ("none", None)


async def test_an_answer_that_was_not_served_is_no_parent() -> None:
    tree = SessionTree()
    tree.restore([], now=1000.0, unix_now=1000.0)
    other = placement(tree, "other", HI)
    other.place(is_side=False)
    async with staged(2, placement=placement(tree, "r1", HI)) as stage:
        await stage.act(0, "answers")
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0)
    other.served({"role": "assistant", "content": text_of(0)}, 1001.0, None)
    assert place_after(tree, text_of(0)).parent_id == "other"
    assert place_after(tree, text_of(1)).parent_id == "r1"


def test_an_answer_served_once_is_stored_in_the_session_and_a_failed_one_is_not() -> None:
    tree = SessionTree()
    draft = draft_of(placement(tree, "g1", HI))
    record = draft.served_once(EngineResponse(200, WHOLE, answer_of(1), False, 0.0), "one_sibling")
    assert (record.turn, record.kind) == (1, "new") and record.asked_key
    assert place_after(tree, text_of(1)).parent_id == "g1"
    failed = draft_of(placement(tree, "g2", HI)).failed("client_disconnected", 499)
    assert (failed.turn, failed.kind) == (1, "new")
    assert failed.session_id != record.session_id


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            EngineResponse(200, WHOLE, answer_of(1), False, 0.0),
            ("served", "fallback: engine_not_ready"),
        ),
        (
            EngineResponse(200, WHOLE, b"", False, 0.0),
            ("failed", "fallback: engine_not_ready: no_answer"),
        ),
    ],
)
def test_an_answer_of_the_fallback_is_recorded_as_the_fallbacks(
    reply: EngineResponse, expected: tuple[str, str]
) -> None:
    draft = draft_of(placement(SessionTree(), "g1", HI))
    record = draft.fell_back(reply, OutageReason.ENGINE_NOT_READY)
    assert (record.state, record.reason) == expected


def test_a_side_call_is_recorded_as_a_side_call() -> None:
    tree = SessionTree()
    draft = draft_of(
        placement(tree, "g1", HI), ruling=ServeOnly(ServeOnlyReason.SIDE_CALL, "marker")
    )
    assert draft.failed("upstream_500", 500).kind == "side"


def test_the_first_place_is_final() -> None:
    tree = SessionTree()
    own = placement(tree, "g1", HI)
    place = own.place(is_side=False)
    assert place is not None and own.place(is_side=True) is place
    assert len(tree) == 1


def test_the_first_end_is_final() -> None:
    tree = SessionTree()
    own = placement(tree, "g1", HI)
    own.served({"content": "not yet"}, 1.0, None)  # has no place yet
    own.place(is_side=False)
    own.served({"content": "first"}, 1001.0, None)
    own.served({"content": "second"}, 1002.0, None)
    own.failed(1003.0)
    assert place_after(tree, "second").evidence is Evidence.QUESTION
    assert place_after(tree, "first").evidence is Evidence.PREFIX


def test_reading_the_session_id_does_not_change_the_tree() -> None:
    tree = SessionTree()
    own = placement(tree, "g1", HI)
    assert own.session_id() is None and len(tree) == 0
    own.place(is_side=False)
    own.served({"content": "first"}, 1001.0, None)
    messages = ({"role": "assistant", "content": "first"}, {"role": "user", "content": "so?"})
    after = placement(tree, "g2", HI, *messages)
    assert after.session_id() == "g1" and len(tree) == 1


class CountingTree(SessionTree):
    num_lookups = 0

    def find(self, request: IncomingRequest) -> LookupResult:
        self.num_lookups += 1
        return super().find(request)


def test_a_main_call_is_looked_up_once_and_a_side_call_also_by_its_quotes() -> None:
    tree = CountingTree()
    question = "What is the weather like?"
    placement(tree, "g1", {"role": "user", "content": question}).place(is_side=False)
    tree.num_lookups = 0
    other = placement(tree, "g2", HI)
    assert other.session_id() is None
    other.place(is_side=False)
    assert tree.num_lookups == 1
    title = placement(tree, "g3", {"role": "user", "content": f"A title for:\n{question}"})
    assert title.session_id() is None
    place = title.place(is_side=True)
    assert place is not None and (place.session_id, place.evidence) == ("g1", Evidence.QUOTE)


class BrokenTree(SessionTree):
    def place(self, request: IncomingRequest, lookup: LookupResult | None = None) -> Place:
        raise RuntimeError("a defect")

    def find(self, request: IncomingRequest) -> LookupResult:
        raise RuntimeError("a defect")


def test_an_error_in_the_session_tree_only_loses_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = placement(BrokenTree(), "g1", HI)
    with caplog.at_level(logging.ERROR):
        assert own.session_id() is None
        draft = draft_of(own)
        record = draft.served_once(
            EngineResponse(200, WHOLE, answer_of(0), False, 0.0), "one_sibling"
        )
    assert (record.state, record.session_id, record.turn) == ("served", None, None)
    assert len(caplog.records) == 2
