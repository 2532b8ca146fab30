"""Find the evaluation rows on which the model was trained. Such rows cannot measure what the model
has learnt."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.admission.task_index import TaskIndex, normalised
from fakevllm.ledger.store import Ledger


def trained_rows(
    ledger: Ledger, tasks: TaskIndex, texts: Sequence[str], *, with_unsent: bool = True
) -> list[int]:
    """Return the positions in `texts` of the texts that were trained, or that wait to be trained. A
    text was trained if a trained request has this text as its question, or belongs to a task with
    this text. If `with_unsent` is True, requests that were not sent to the server yet count as
    waiting. The function reads all trained groups from the ledger, and blocks the thread meanwhile.
    """
    keys = [normalised(text) for text in texts]
    known = tasks.texts_by_id(set(keys))
    questions, task_ids = ledger.trained(texts, list(known), with_unsent=with_unsent)
    trained = {normalised(question) for question in questions} | {known[id] for id in task_ids}
    return [position for position, key in enumerate(keys) if key in trained]
