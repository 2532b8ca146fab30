"""The command `fakevllm sessions`: list the sessions in the ledger, or draw one session as a tree.
A session is a conversation of an app.

The command reads the ledger file directly, so it also works while no proxy is running.
"""

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
from fakevllm.ledger.offline_copy import offline_ledger
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.session_outline import OutlineItem, outline
from fakevllm.ledger.session_reads import SessionGroup, SessionRow
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.terminal_text import printable

ID_CHARS = 12
"""Number of characters of a session's id to print, enough for `fakevllm sessions ID`."""
QUESTION_CHARS = 32
REWARD_NOTE = "reward: of the served answers"
_STYLES = {
    "new": "bold",
    "sub_agent": "bold",
    "regenerates": "yellow",
    "edits": "yellow",
    "compacted": "magenta",
    "repeats": "red",
    "side": "dim",
}


def render(
    ledger_file: Path, session: str | None, limit: int, names: Mapping[str, str]
) -> RenderableType:
    """Return a table of the latest `limit` sessions. If `session` is set, return a tree instead:
    the tree of the session whose id begins with `session`.

    `names` maps the fingerprints of API keys to their names. Raises UserError if the ledger file
    does not exist. Raises UserError as well if `session` matches no session or several sessions.
    """
    if not ledger_file.exists():
        raise UserError(f"There is no ledger {ledger_file} yet: name another with --run-dir.")
    ledger = Ledger.open(offline_ledger(ledger_file))
    try:
        if session is None:
            return render_list(ledger.sessions.latest(limit), names)
        return _session_tree(ledger, session, names)
    finally:
        ledger.close()


def _session_tree(ledger: Ledger, prefix: str, names: Mapping[str, str]) -> RenderableType:
    ids = ledger.sessions.ids_with_prefix(prefix)
    if not ids:
        raise UserError(f"No session id begins with {prefix!r}: `fakevllm sessions` lists them.")
    if len(ids) > 1 and ids[0] != prefix:
        raise UserError(f"Several session ids begin with {prefix!r}: write more of the id.")
    groups = ledger.sessions.groups(ids[0])
    children = ledger.sessions.children(ids[0])
    return render_tree(ids[0], groups, children, names, ledger.feedback.of_session(ids[0]))


def render_list(sessions: Sequence[SessionRow], names: Mapping[str, str]) -> RenderableType:
    if not sessions:
        return Text("No sessions yet.")
    table = Table(box=None, pad_edge=False, caption=REWARD_NOTE, caption_justify="left")
    table.add_column("session", no_wrap=True, min_width=ID_CHARS)
    table.add_column("app", no_wrap=True, min_width=8)
    for name in ("turns", "groups", "reward"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    has_arms = any(row.arm is not None for row in sessions)
    if has_arms:
        table.add_column("arm", no_wrap=True, min_width=8)
    table.add_column("last seen", no_wrap=True, min_width=14)
    table.add_column("begins with", no_wrap=True, overflow="ellipsis")
    for row in sessions:
        question = Text(printable(" ".join(row.question.split())))
        if row.parent_session_id is not None:
            question = Text("sub-agent  ", "cyan").append(question)
        table.add_row(
            row.session_id[:ID_CHARS],
            Text(_app(row.app_key, names)),
            str(row.turns),
            str(row.num_groups),
            _number(row.reward),
            *([printable(row.arm or "–")] if has_arms else []),
            _time(row.seen_at),
            question,
        )
    return table


def render_tree(
    session_id: str,
    groups: Sequence[SessionGroup],
    children: Iterable[tuple[str, str | None]],
    names: Mapping[str, str],
    feedback: Iterable[FeedbackRecord] = (),
) -> RenderableType:
    """Return a session drawn as a tree. Each node is a group (one request with its answers).

    Groups of other branches are drawn below the group with which their branch begins, as in
    `ledger/session_outline`. Feedback on an answer is drawn below the group of the answer.

    `children` has one pair for each sub-agent that this session started. The pair is (id of the
    sub-agent's session, id of the group that started the sub-agent).
    """
    first = groups[0]
    head = Text(session_id, "bold").append(f"  {_app(first.app_key, names)}", "not bold")
    if first.parent_session_id is not None:
        head.append(f"  started by {first.parent_session_id[:ID_CHARS]}", "cyan")
    tree = Tree(head, guide_style="dim")
    feedback_rows: defaultdict[str, list[FeedbackRecord]] = defaultdict(list)
    for row in feedback:
        feedback_rows[row.group_id].append(row)
    _add_items(tree, outline(groups, children), feedback_rows)
    return Lines(tree, Text(_summary(groups), "dim"))


def _add_items(
    tree: Tree,
    items: Sequence[OutlineItem],
    feedback_rows: Mapping[str, list[FeedbackRecord]],
) -> None:
    for item in items:
        if item.group is None:
            tree.add(Text(f"sub-agent {(item.agent_session_id or '')[:ID_CHARS]}", "cyan"))
            continue
        branch = tree.add(_group_line(item.group, is_new_turn=item.is_new_turn))
        for row in feedback_rows.get(item.group.group_id, []):
            branch.add(_feedback_line(row))
        _add_items(branch, item.below, feedback_rows)


def _group_line(group: SessionGroup, *, is_new_turn: bool) -> Text:
    text = Text(f"{group.turn:>3}  " if is_new_turn else "     ", no_wrap=True, overflow="ellipsis")
    text.append(f"{group.kind.replace('_', '-'):<11}", _STYLES.get(group.kind, ""))
    text.append(f" N={group.num_siblings:<2}{_number(group.reward):>6}  ")
    question = _line(group.question) if is_new_turn else "(a tool's result)"
    text.append(question, "" if is_new_turn else "dim")
    if group.arm is not None:
        text.append(f"  {printable(group.arm)}", "magenta")
    text.append(f"  {group.reason or group.state}", "dim")
    return text.append(f", by {group.evidence}, {_time(group.received_at)}", "dim")


def _feedback_line(row: FeedbackRecord) -> Text:
    values = [row.thumbs, None if row.score is None else f"score {row.score:g}"]
    values += [_edit_word(row), "comment" if row.comment else None]
    if row.kind != "feedback":
        values = [row.kind.replace("_", " ")]
    words = ", ".join(word for word in values if word is not None) or "withdrawn"
    amount = "" if row.amount is None else f" {row.amount:+.2f}"
    text = Text(no_wrap=True, overflow="ellipsis").append(f"feedback: {words}", "green")
    text.append(f"  {row.state}{amount}{f', {row.reason}' if row.reason else ''}", "dim")
    return text.append(f", {_time(row.received_at)}", "dim")


def _edit_word(row: FeedbackRecord) -> str | None:
    """Return the word `edited` for feedback with a corrected answer, else None. If the correction
    may be trained as a demonstration, its state is added."""
    if row.edit_state is not None:
        reason = "" if row.edit_reason is None else f", {row.edit_reason.partition(':')[0]}"
        return f"edited ({row.edit_state}{reason})"
    return "edited" if row.edited else None


def _summary(groups: Sequence[SessionGroup]) -> str:
    turns = max(group.turn for group in groups)
    return f"{counted(turns, 'turn')}, {counted(len(groups), 'group')}; {REWARD_NOTE}"


def _app(app_key: str | None, names: Mapping[str, str]) -> str:
    return "no key" if app_key is None else names.get(app_key, app_key)


def _line(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= QUESTION_CHARS else line[: QUESTION_CHARS - 1] + "…"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")
