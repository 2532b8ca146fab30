"""Count the calls that branch, and find out why. A call branches if it does not continue where an
earlier call of its session ended.

A session is a sequence of model calls. Normally, each call continues the previous call. There are
two kinds of sessions:

* An episode that a client has claimed is one session. Its calls are in order of time.
* A passive group has the answers to one request of an app. All its calls have the same prompt, so
  only the first call is examined. The session consists of the previous turn of the conversation
  (`FinishedGroup.follows`) and this call. A group without a known previous turn is not examined.

The functions do no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.forest.branch_causes import Cause, SessionCall, drift_metrics, find_causes
from fakevllm_server.forest.call_text_comparison import Vocabulary
from fakevllm_server.types.calls import FinishedGroup

MAX_TOKENS = 1_000_000
"""Maximum number of tokens per step that are compared as text. Without a limit, the comparison
would delay the record of the step."""


def branch_metrics(
    groups: Sequence[FinishedGroup], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """Return metrics about the calls that branch. A call branches if it does not continue an
    earlier call of its session (a sequence of model calls).

    `branch_<cause>` is the number of calls with this cause. `branch_rate` is the share of branching
    calls among all calls except the first call of each session. `branch_rate` is absent if no
    session has more than one call. The result also contains `drift_rate`. The module
    `forest.branch_causes` defines `drift_rate` and the causes.

    Some causes are found only by a comparison of texts, which needs a vocabulary. Without a
    vocabulary, calls with these causes count as `unknown`. At most about MAX_TOKENS tokens are
    compared as text. Calls beyond this limit count as `not_read`.
    """
    causes = find_causes(_episode_calls(groups), vocabulary, MAX_TOKENS)
    # Skip the first call of each pair: it was counted with its own group, or never captured.
    causes += find_causes(_turn_pairs(groups), vocabulary, MAX_TOKENS)[1::2]
    later = [cause for cause in causes if cause is not Cause.FIRST]
    num_branched = sum(cause is not Cause.EXTENDS for cause in later)
    rate = {"branch_rate": num_branched / len(later)} if later else {}
    return {**drift_metrics(causes), **rate}


def _episode_calls(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    return [
        SessionCall((group.group_id, episode.index), number, call.prompt_ids, call.response_ids)
        for group in groups
        for episode in group.episodes
        if len(episode.calls) > 1
        for number, call in enumerate(episode.calls)
    ]


def _turn_pairs(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    """Return a pair of calls for each group whose previous turn (of the conversation) is known: the
    call of the previous turn, and the first call of the group."""
    pairs: list[SessionCall] = []
    for group in groups:
        own = [call for episode in group.episodes for call in episode.calls]
        if group.follows is not None and own:
            pairs += [
                SessionCall(group.group_id, number, call.prompt_ids, call.response_ids)
                for number, call in enumerate((group.follows, own[0]))
            ]
    return pairs
