"""The messages between `fakevllm eval` and the proxy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from fakevllm.runtime.plurals import counted
from fakevllm_adapters.protocol.swarm import Task

MAX_SAMPLES = 64
"""Maximum number of samples of one row."""
MAX_VERSIONS = 4
"""Maximum number of versions in one evaluation. An engine can hold this many sets of weights
besides the newest one."""
NO_HOOKS = "The proxy has no hooks, so it cannot score rows: start it with --hooks FOLDER."
HOW_TO_SCORE = (
    "try the hook with `fakevllm check-hook`, and check that the rows have the fields that it reads"
)
"""Advice for a user whose hook scores no row."""
MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a row's text that a message shows."""
CHECK_PATH = "/fakevllm/eval/check"
ROW_PATH = "/fakevllm/eval"
END_PATH = "/fakevllm/eval/end"


class CheckRequest(BaseModel):
    """Request to check, before anything is sampled, whether dataset rows can be evaluated."""

    texts: list[str]
    """The texts of the rows."""
    versions: list[int] = Field(default=[], max_length=MAX_VERSIONS)
    """Versions of the weights. The proxy loads them if the rows can be evaluated. If the list is
    empty, the served weights are evaluated."""


class CheckReply(BaseModel):
    """Reply that says whether the dataset rows can be evaluated."""

    has_hooks: bool
    """Whether the proxy has hooks. Without hooks, the proxy cannot score samples."""
    trained: list[int]
    """Positions in `texts` of the rows that were trained, or wait to be trained."""
    refusal: str | None = None
    """Reason why a version cannot be sampled; None if all versions can be sampled."""


class EndRequest(BaseModel):
    """Message in which `fakevllm eval` reports that an evaluation has ended."""

    versions: list[int] = Field(max_length=MAX_VERSIONS)
    """Versions that the evaluation no longer needs."""


class EndReply(BaseModel):
    """Reply to an EndRequest. It has no fields."""


class RowRequest(BaseModel):
    """Request to sample answers to one dataset row, and to score these answers."""

    eval_id: str = Field(min_length=1, max_length=100)
    """Id of the evaluation, which the ledger stores."""
    task: Task
    num_samples: int = Field(ge=1, le=MAX_SAMPLES)
    """Number of samples at temperature 1. One greedy sample is added to them."""
    max_tokens: int | None = Field(default=None, ge=1)
    version: int | None = Field(default=None, ge=0)
    """Version of the weights to sample; None for the served weights."""


class Sample(BaseModel):
    """One sampled answer to a dataset row, with its reward."""

    text: str | None
    """Text of the answer; None if there is no answer."""
    reward: float | None
    failure: str | None
    """Reason why the answer is missing or not usable; None for a usable answer."""


class RowReply(BaseModel):
    """Reply to a RowRequest: the sampled answers to one dataset row, with their rewards."""

    group_id: str
    """Id under which the ledger has the samples."""
    first_version: int | None
    """Version of the weights that the server had before the first sample; None if it is unknown."""
    last_version: int | None
    """Version of the weights that the server had after the last sample; None if it is unknown."""
    greedy: Sample
    samples: list[Sample]
    reason: str | None
    """Reason why no sample has a reward; None if at least one sample has a reward."""
    hook_hash: str | None = None
    """Digest of the hook files that scored the samples; None if it is unknown."""


def trained_text(file: Path, texts: Sequence[str]) -> str:
    """Return the beginning of a message to the user. The message says that the model was trained on
    rows of a dataset. Such rows cannot show what the model has learnt."""
    was, they = ("was", "it cannot") if len(texts) == 1 else ("were", "they cannot")
    return (
        f"{counted(len(texts), 'row')} of {file} {was} trained (the first: "
        f"{texts[0][:MAX_SHOWN_CHARS]!r}), so {they} show what the model has learnt"
    )
