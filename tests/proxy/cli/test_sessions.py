"""The list and the tree of `fakevllm sessions`."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from fakevllm.cli.sessions import render, render_list, render_tree
from fakevllm.errors import UserError
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.session_reads import SessionGroup
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.test_session_reads import placed, put


def lines_of(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def make_group(
    group_id: str,
    parent_id: str | None,
    turn: int,
    kind: str = "continues",
    question: str = "words",
    reward: float | None = 0.5,
) -> SessionGroup:
    at = 1_000_000.0 + int(group_id)
    return SessionGroup(
        group_id,
        parent_id,
        turn,
        kind,
        "prefix",
        at,
        question,
        4,
        reward,
        "trained",
        None,
        "k",
        None,
    )


TREE = [
    make_group("1", None, 1, "new", "Read the notes\nand go on with all that is written there"),
    make_group("2", None, 1, "side", "Generate a title"),
    make_group("3", "1", 1),
    make_group("4", "3", 2, question="And now?", reward=None),
    make_group("5", "4", 3, question="Fine"),
    make_group("6", "3", 2, "regenerates", "And now?"),
    make_group("7", "6", 3, question="Better"),
]


def test_the_last_branch_continues_the_trunk_and_the_others_are_nested() -> None:
    lines = lines_of(
        render_tree("0123456789abcdef", TREE, [("cafe0123456789", "3")], {"k": "alice"})
    )
    assert lines[0] == "0123456789abcdef  alice"
    starts = [line.split("words")[0][:44].rstrip() for line in lines[1:-1]]
    assert starts == [
        "├──   1  new         N=4   0.50  Read the no",
        "├──   1  side        N=4   0.50  Generate a",
        "├──      continues   N=4   0.50  (a tool's r",
        "├── sub-agent cafe01234567",
        "├──   2  continues   N=4      –  And now?  t",
        "│   └──   3  continues   N=4   0.50  Fine  t",
        "├──   2  regenerates N=4   0.50  And now?  t",
        "└──   3  continues   N=4   0.50  Better  tra",
    ]
    assert lines[-1] == "3 turns, 7 groups; reward: of the served answers"
    assert "trained, by prefix" in lines[5]


def test_feedback_is_below_its_answer() -> None:
    joined = FeedbackRecord(
        group_id="6", feedback_id="f", received_at=0.0, thumbs="up", edited="Six.", amount=1.0
    )
    joined = replace(joined, state=FeedbackState.JOINED)
    back = replace(
        joined, thumbs=None, edited=None, amount=None, state=FeedbackState.KEPT, reason="too_late"
    )
    other = replace(joined, kind="next_message", state=FeedbackState.WAITING, amount=None)
    edit = replace(back, edited="Six.", reason=None, edit_state="kept", edit_reason="too_long: 9")
    shown = lines_of(render_tree("s", TREE, [], {}, [joined, back, edit, other]))
    at = next(number for number, line in enumerate(shown) if "regenerates" in line)
    assert [line.rpartition(", ")[0] for line in shown[at + 1 : at + 5]] == [
        "│   ├── feedback: up, edited  joined +1.00",
        "│   ├── feedback: withdrawn  kept, too_late",
        "│   ├── feedback: edited (kept, too_long)  kept",
        "│   └── feedback: next message  waiting",
    ]


def test_a_long_conversation_is_lines_of() -> None:
    groups = [make_group(str(n), str(n - 1) if n > 1 else None, n) for n in range(1, 3001)]
    assert len(lines_of(render_tree("s", groups, [], {}))) == 3002


def test_lines_fit_the_terminal() -> None:
    shown = render_tree("0123456789abcdef", TREE, [], {})
    assert max(map(len, lines_of(shown, width=60))) <= 60


def test_the_list_has_the_names_of_keys_and_short_ids(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file)
    put(ledger, placed("a", "0123456789abcdef", kind="new", question="What\nis it?"))
    shown = lines_of(render(file, None, 10, {"0a1b2c3d": "alice"}))  # while a writer has it open
    ledger.close()
    assert " ".join(shown[0].split()) == "session app turns groups reward last seen begins with"
    assert shown[1].startswith("0123456789ab  alice")
    assert shown[-1] == "reward: of the served answers"
    assert "0.00" in shown[1] and shown[1].endswith("What is it?")
    tree = lines_of(render(file, "0123", 10, {}))
    assert tree[0] == "0123456789abcdef  0a1b2c3d"


def test_a_narrow_terminal_shows_ids_that_can_be_copied(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file)
    put(ledger, placed("a", "0123456789abcdef", kind="new", question="many words " * 20))
    ledger.close()
    shown = lines_of(render(file, None, 10, {}), width=80)
    assert shown[1].startswith("0123456789ab ")


def test_the_arm_is_shown_if_sessions_have_arms(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file)
    assigned = {"arm": "released", "arm_propensity": 0.8}
    unavailable = replace(placed("b", "bb"), arm="training", reason="arm_unavailable: gone")
    put(ledger, replace(placed("a", "aa"), **assigned), unavailable)
    ledger.close()
    head, *shown = (line.split() for line in lines_of(render(file, None, 10, {})))
    assert head[5] == "arm"
    assert {row[0]: row[-4] for row in shown[:2]} == {"aa": "released", "bb": "–"}
    assert "  released  " in lines_of(render(file, "aa", 10, {}))[1]
    assert "  training  arm_unavailable" in lines_of(render(file, "bb", 10, {}))[1]


def test_a_missing_ledger_and_ambiguous_ids_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with pytest.raises(UserError, match="There is no ledger"):
        render(file, None, 10, {})
    assert not file.exists()
    ledger = Ledger.open(file)
    put(ledger, placed("a", "ab"), placed("b", "ac"), placed("c", "abc"))
    ledger.close()
    with pytest.raises(UserError, match="No session id begins with 'x'"):
        render(file, "x", 10, {})
    with pytest.raises(UserError, match="Several"):
        render(file, "a", 10, {})
    assert lines_of(render(file, "ab", 10, {}))[0].startswith("ab ")


def test_an_empty_ledger_has_no_sessions() -> None:
    assert lines_of(render_list([], {})) == ["No sessions yet."]


def test_control_characters_of_users_are_escaped(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file)
    put(ledger, replace(placed("a", "ab"), question="hi\x1b[31m\x1b]0;owned\x07\x9b2J"))
    ledger.close()
    for shown in (render(file, None, 10, {}), render(file, "ab", 10, {})):
        lines = "\n".join(lines_of(shown))
        assert "hi�[31m�]0;owned" in lines and lines.replace("\n", "").isprintable()
