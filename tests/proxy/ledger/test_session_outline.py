"""The outline of a session: its requests as nested lists."""

from __future__ import annotations

import time

from fakevllm.ledger.session_outline import MAX_DEPTH, OutlineItem, outline
from fakevllm.ledger.session_reads import SessionGroup


def request(
    name: str, parent: str | None = None, turn: int = 1, kind: str = "continues"
) -> SessionGroup:
    return SessionGroup(
        name, parent, turn, kind, "prefix", 1.0, "words", 4, 0.5, "trained", None, "k", None
    )


def text_of(items: list[OutlineItem]) -> str:
    """Return an outline as text. The requests of the live branch have a star, sub-agents have an
    at sign, and lists have brackets."""
    words: list[str] = []
    for item in items:
        star = "*" if item.is_live else ""
        name = f"@{item.agent_session_id}" if item.group is None else item.group.group_id
        words.append(f"{name}{star}{f'[{text_of(item.below)}]' if item.below else ''}")
    return " ".join(words)


def depth_of(items: list[OutlineItem]) -> int:
    """Return the number of lists inside each other."""
    depth = 0
    while items:
        depth += 1
        items = [below for item in items for below in item.below]
    return depth


def test_a_conversation_without_branches_is_one_flat_list() -> None:
    groups = [request(str(n), str(n - 1) if n else None, n + 1) for n in range(3000)]
    began = time.process_time()
    items = outline(groups)
    assert time.process_time() - began < 1.0
    assert len(items) == 3000 and depth_of(items) == 1
    assert all(item.is_live and item.is_new_turn for item in items)


def test_the_branch_of_the_latest_request_goes_on_and_the_others_are_nested() -> None:
    groups = [
        request("a", kind="new"),
        request("b", "a", 2),
        request("c", "b", 3),
        request("b2", "a", 2, "edits"),
        request("c2", "b2", 3),
    ]
    assert text_of(outline(groups)) == "a* b[c] b2* c2*"
    # The latest request continues the older branch, so this branch goes on.
    assert text_of(outline([*groups, request("d", "c", 4)])) == "a* b2[c2] b* c* d*"


def test_side_calls_are_shown_by_their_time_and_are_no_branches() -> None:
    groups = [
        request("title", kind="side"),
        request("a", kind="new"),
        request("s", None, 1, "side"),
        request("b", "a", 2),
    ]
    assert text_of(outline(groups)) == "title a* s b*"


def test_requests_without_a_known_parent_begin_branches_of_their_own() -> None:
    groups = [request("b", "gone"), request("c", "b", 2), request("d", None, 3, "compacted")]
    assert text_of(outline(groups)) == "b[c] d*"


def test_sub_agents_follow_the_request_that_started_them() -> None:
    groups = [request("a"), request("b", "a", 2), request("b2", "a", 2, "regenerates")]
    children = [("x", "a"), ("y", "b"), ("z", "gone")]
    assert text_of(outline(groups, children)) == "@z a* @x b[@y] b2*"


def test_a_tools_result_begins_no_turn() -> None:
    groups = [request("a", None, 1, "new"), request("b", "a", 1), request("c", "b", 2)]
    assert [item.is_new_turn for item in outline(groups)] == [True, False, True]


def test_parents_that_form_a_circle_lose_no_request() -> None:
    groups = [request("a", "b"), request("b", "a"), request("c", "c")]
    assert text_of(outline(groups)) == "a[b] c*"


def test_branches_in_branches_are_nested_to_a_limit_and_lose_no_request() -> None:
    # Each level of the earlier branch has a branch of its own.
    groups = [request("r", kind="new")]
    for n in range(1000):
        parent = f"a{n - 1}" if n else "r"
        groups += [request(f"a{n}", parent, n + 2), request(f"b{n}", parent, n + 2, "edits")]
    # Later requests on `b` make the chain of `a` an earlier branch at every level.
    groups += [request(f"c{n}", f"b{n}", n + 3) for n in reversed(range(1000))]
    items = outline(groups)
    assert depth_of(items) == MAX_DEPTH + 1
    names = text_of(items).replace("[", " ").replace("]", " ").replace("*", "").split()
    assert sorted(names) == sorted(group.group_id for group in groups)
