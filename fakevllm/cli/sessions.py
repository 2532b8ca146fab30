"""`fakevllm sessions`: what the ledger knows of sessions, drawn. Reads the file beside a running
proxy, and without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fakevllm.errors import UserError
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.session_reads import SessionGroup, SessionRow
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.terminal_text import printable

ID_CHARS = 12
"""Of a session's id: what `fakevllm sessions ID` takes."""
QUESTION_CHARS = 32
REWARD = "reward: of what was served"
_STYLES = {
    "new": "bold",
    "sub_agent": "bold",
    "regenerates": "yellow",
    "edits": "yellow",
    "compacted": "magenta",
    "repeats": "red",
    "side": "dim",
}


def show(
    ledger_file: Path, session: str | None, limit: int, names: Mapping[str, str]
) -> RenderableType:
    """The list, or one session's tree. `names`: of app keys, by fingerprint. Raises UserError."""
    if not ledger_file.exists():
        raise UserError(f"There is no ledger {ledger_file} yet: name another with --run-dir.")
    ledger = Ledger.open(ledger_file)
    try:
        if session is None:
            return render_list(ledger.sessions.latest(limit), names)
        return _tree_of(ledger, session, names)
    finally:
        ledger.close()


def _tree_of(ledger: Ledger, beginning: str, names: Mapping[str, str]) -> RenderableType:
    found = ledger.sessions.ids_with_prefix(beginning)
    if not found:
        raise UserError(f"No session begins with {beginning!r}: `fakevllm sessions` lists them.")
    if len(found) > 1 and found[0] != beginning:
        raise UserError(f"Several sessions begin with {beginning!r}: give more of its id.")
    groups = ledger.sessions.groups(found[0])
    started = ledger.sessions.children(found[0])
    return render_tree(found[0], groups, started, names, ledger.feedback.of_session(found[0]))


def render_list(sessions: Sequence[SessionRow], names: Mapping[str, str]) -> RenderableType:
    if not sessions:
        return Text("No sessions yet.")
    table = Table(box=None, pad_edge=False, caption=REWARD, caption_justify="left")
    for name in ("session", "app"):
        table.add_column(name, no_wrap=True, min_width=8)
    for name in ("turns", "groups", "reward"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("last seen", no_wrap=True, min_width=14)
    table.add_column("begins with", no_wrap=True, overflow="ellipsis")
    for row in sessions:
        begins = Text(printable(" ".join(row.question.split())))
        if row.parent_session_id is not None:
            begins = Text("sub-agent  ", "cyan").append(begins)
        table.add_row(
            row.session_id[:ID_CHARS],
            _app(row.app_key, names),
            str(row.turns),
            str(row.num_groups),
            _number(row.reward),
            _time(row.seen_at),
            begins,
        )
    return table


def render_tree(
    session_id: str,
    groups: Sequence[SessionGroup],
    started: Iterable[tuple[str, str | None]],
    names: Mapping[str, str],
    feedback: Iterable[FeedbackRecord] = (),
) -> RenderableType:
    """What goes on from the same answer stands below it; of several, the last goes on at the same
    level, and those before it are branches. What was said of an answer stands below it too."""
    first = groups[0]
    head = Text(session_id, "bold").append(f"  {_app(first.app_key, names)}", "not bold")
    if first.parent_session_id is not None:
        head.append(f"  started by {first.parent_session_id[:ID_CHARS]}", "cyan")
    tree = Tree(head, guide_style="dim")
    known = {group.group_id for group in groups}
    after: defaultdict[str | None, list[SessionGroup]] = defaultdict(list)
    latest: str | None = None
    for group in groups:
        above = group.parent_id if group.parent_id in known else None
        if group.kind == "side":
            above = latest  # where it was asked, whatever of the history it holds
        else:
            latest = group.group_id
        after[above].append(group)
    agents: defaultdict[str | None, list[str]] = defaultdict(list)
    for one, parent_id in started:
        agents[parent_id if parent_id in known else None].append(one)
    said: defaultdict[str, list[FeedbackRecord]] = defaultdict(list)
    for row in feedback:
        said[row.group_id].append(row)
    _grow(tree, after, agents, said)
    return Lines(tree, Text(_sum(groups), "dim"))


def _grow(
    tree: Tree,
    after: Mapping[str | None, list[SessionGroup]],
    agents: Mapping[str | None, list[str]],
    said: Mapping[str, list[FeedbackRecord]],
) -> None:
    """Without recursion along a conversation, which may be long: only branches nest."""
    work: list[tuple[Tree, str | None, int]] = [(tree, None, 0)]
    while work:
        at, parent_id, parent_turn = work.pop()
        chain: str | None = parent_id
        turn, is_going = parent_turn, True
        while is_going:
            coming = after.get(chain, [])
            mains = [group for group in coming if group.kind != "side"]
            for session_id in agents.get(chain, []):
                at.add(Text(f"sub-agent {session_id[:ID_CHARS]}", "cyan"))
            for group in coming:
                branch = at.add(_described(group, turn))
                for row in said.get(group.group_id, []):
                    branch.add(_heard(row))
                if group is not (mains[-1] if mains else None):
                    work.append((branch, group.group_id, group.turn))
            is_going = bool(mains)
            if is_going:
                chain, turn = mains[-1].group_id, mains[-1].turn


def _described(group: SessionGroup, turn_before: int) -> Text:
    is_new_turn = group.turn != turn_before or group.kind not in ("continues", "parallel")
    text = Text(f"{group.turn:>3}  " if is_new_turn else "     ", no_wrap=True, overflow="ellipsis")
    text.append(f"{group.kind.replace('_', '-'):<11}", _STYLES.get(group.kind, ""))
    text.append(f" N={group.num_siblings:<2}{_number(group.reward):>6}  ")
    said = _line(group.question) if is_new_turn else "(a tool's result)"
    text.append(said, "" if is_new_turn else "dim")
    text.append(f"  {group.reason or group.state}", "dim")
    return text.append(f", by {group.evidence}, {_time(group.received_at)}", "dim")


def _heard(row: FeedbackRecord) -> Text:
    said = [row.thumbs, None if row.score is None else f"score {row.score:g}"]
    said += ["edited" if row.edited else None, "comment" if row.comment else None]
    if row.kind != "feedback":
        said = [row.kind.replace("_", " ")]
    words = ", ".join(word for word in said if word is not None) or "take back"
    counted = "" if row.amount is None else f" {row.amount:+.2f}"
    text = Text(no_wrap=True, overflow="ellipsis").append(f"feedback: {words}", "green")
    text.append(f"  {row.state}{counted}{f', {row.reason}' if row.reason else ''}", "dim")
    return text.append(f", {_time(row.received_at)}", "dim")


def _sum(groups: Sequence[SessionGroup]) -> str:
    turns = max(group.turn for group in groups)
    return f"{_many(turns, 'turn')}, {_many(len(groups), 'group')}; {REWARD}"


def _many(num: int, name: str) -> str:
    return f"{num} {name}" if num == 1 else f"{num} {name}s"


def _app(app_key: str | None, names: Mapping[str, str]) -> str:
    return "no key" if app_key is None else names.get(app_key, app_key)


def _line(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= QUESTION_CHARS else line[: QUESTION_CHARS - 1] + "…"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")
