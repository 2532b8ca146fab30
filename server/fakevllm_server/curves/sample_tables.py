"""Tables of sampled answers: for some groups of a training step, the prompt, each answer, its
reward and its advantage. TRL's trainers write tables of the same name with `log_completions`. This
module does no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

COMPLETIONS = "completions"
"""Name of the tables in the trackers. TRL uses the same name."""
MAX_CHARS = 4_000
"""Maximum length of a text in a table, without the note about what was left out. A table of 4
groups with 8 answers then has at most 256,000 characters."""
_SPECIAL = re.compile(r"[\\`*_{}\[\]()#!|~&<>$\"']")
"""Characters with a meaning in Markdown or in HTML."""
_UNPRINTABLE = "\ufffd"


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One answer in a table: a sibling (one of the answers to a request), or an episode's last
    call."""

    step: int
    group: int
    """Number of the group in the table, from 1. The rows of a group are compared with each
    other."""
    prompt: str
    completion: str
    reward: float | None
    """The reward as the hook or the client gave it. None if there is none."""
    advantage: float | None
    """Mean advantage over the trained tokens. None if the answer was not trained."""


COLUMNS = ("step", "group", "prompt", "completion", "reward", "advantage")
"""Names of the columns: the fields of SampleRow. Those except `group` are TRL's."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The table of one training step."""

    rows: Sequence[SampleRow]
    num_missing: int = 0
    """Number of groups that the table lacks, because their texts are not available."""

    @property
    def data(self) -> list[list[object]]:
        """The values of each row, in the order of COLUMNS."""
        return [list(astuple(row)) for row in self.rows]


def shortened(text: str) -> str:
    """Return a text with at most MAX_CHARS characters of the original. A longer text loses its
    middle, because a prompt's question and an answer's result are at their ends.

    >>> shortened("a" * 3_000 + "b" * 3_000)[1_990:2_040]
    'aaaaaaaaaa […2000 characters…] bbbbbbbbbbbbbbbbbbb'
    """
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


def as_markdown(table: SampleTable) -> str:
    """Return a table in Markdown, as TensorBoard shows it. Texts of the model are escaped: they
    cannot make another cell, a link or a picture.

    >>> print(as_markdown(SampleTable([SampleRow(1, 1, "a|b", "<b>\\n2", 0.5, None)])))
    | step | group | prompt | completion | reward | advantage |
    | --- | --- | --- | --- | --- | --- |
    | 1 | 1 | a&#124;b | &#60;b&#62;<br>2 | 0.5 |  |
    """
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(map(_cell, row) for row in table.data)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return "" if value is None else str(value)
    return "<br>".join(_escaped(line) for line in value.splitlines())


def _escaped(line: str) -> str:
    shown = "".join(char if char.isprintable() or char == "\t" else _UNPRINTABLE for char in line)
    return _SPECIAL.sub(lambda found: f"&#{ord(found.group())};", shown)
