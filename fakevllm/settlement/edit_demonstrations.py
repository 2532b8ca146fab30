"""Make demonstrations from users' edits of answers. This module decides which token ids an edit
has, and whether the edit can be trained. It does no I/O.

No engine has sampled the edited text, so it has no ids. The engine's own `/tokenize` renders the
conversation with the edit, and the ids of the recorded call show where the answer begins. If the
rendered ids do not begin with those of the recorded prompt, the edit is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from fakevllm_adapters.privacy.patterns import MARKER
from fakevllm_adapters.protocol.packed_numbers import pack_ids, unpack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall, DemonstrationIds

Json = dict[str, Any]

_TEMPLATE_FIELDS = ("tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields of a chat request that change the prompt, and that vLLM's `/tokenize` has too."""
_REASONING_FIELDS = ("reasoning", "reasoning_content")
_COMPLETE_IDS = frozenset(
    {
        *("sampling_not_trainable", "missing_logprob", "missing_allowed_tokens"),
        *("nothing_to_choose", "unknown_weights"),
    }
)
"""Reasons why a call is not trained although all its token ids were recorded. A demonstration needs
the ids alone."""


class EditKept(Exception):
    """Raised if an edit cannot be trained. The message is the reason, and begins with a slug."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The served answer that a user has edited: the token ids of its prompt and of its response."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    @staticmethod
    def of(calls: Sequence[CapturedCall]) -> RecordedAnswer:
        """Return the answer that these recorded calls produced. Raises EditKept if the ledger does
        not have all tokens of exactly one call."""
        if len(calls) > 1:
            raise EditKept(f"several_calls: {len(calls)} of one answer")
        for call in calls:
            reason = (call.untrainable or "").partition(":")[0]
            if reason == "redacted":
                raise EditKept("redacted: the ledger has no tokens of a redacted answer")
            prompt_ids, response_ids = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
            if reason and reason not in _COMPLETE_IDS:
                raise EditKept(f"no_calls: the answer's tokens are not complete ({reason})")
            if prompt_ids and response_ids:
                return RecordedAnswer(prompt_ids, response_ids)
        raise EditKept("no_calls: the answer's tokens are not in the ledger")


def check_text(edited: str | None, served: str | None) -> str:
    """Return the edited text. Raises EditKept if the text is missing or redacted, or if it equals
    the `served` text."""
    if edited is None:
        raise EditKept("forgotten")
    if MARKER.search(edited):
        raise EditKept("redacted: the edit has redacted texts")
    if edited == served:
        raise EditKept("same_text: the edit equals the answer")
    return edited


def check_message(message: object) -> None:
    """Raise EditKept if the served `message` has reasoning. An edit has no reasoning, so training
    on it would teach the model to answer without reasoning.

    >>> check_message({"role": "assistant", "content": "4", "reasoning": None})
    """
    fields = cast(Json, message) if isinstance(message, dict) else {}
    if any(fields.get(name) for name in _REASONING_FIELDS):
        raise EditKept("reasoning: the answer has reasoning, and the edit has none")


def tokenize_requests(request: Json, edited: str) -> list[Json]:
    """Return the bodies of the requests to `/tokenize` that render an edit (a user's corrected
    answer). `request` is the request in the engine's format.

    A chat is rendered twice: with the edit, and with another text. A text completion needs no
    second request, because no template follows its text. Raises EditKept if the request has neither
    messages nor a prompt text. Also raises EditKept if the answer is neither a whole message nor
    the continuation of a text.
    """
    messages, prompt = request.get("messages"), request.get("prompt")
    if isinstance(messages, list):
        options = {name: request[name] for name in _TEMPLATE_FIELDS if request.get(name)}
        return [
            {
                "messages": _with_answer(request, cast(list[Any], messages), text),
                "add_generation_prompt": False,
                **options,
            }
            for text in (edited, _other(edited))
        ]
    if not isinstance(prompt, str):
        raise EditKept("no_prompt: the request has neither messages nor a prompt text")
    special = {"add_special_tokens": False} if request.get("add_special_tokens") is False else {}
    return [{"prompt": prompt + edited, **special}]


def _with_answer(request: Json, messages: list[Any], text: str) -> list[Any]:
    """Return the messages of a request, with `text` as the answer. Raises EditKept if this is not
    possible."""
    if request.get("continue_final_message"):
        last = messages[-1] if messages else None
        begin = cast(Json, last).get("content") if isinstance(last, dict) else None
        if not isinstance(begin, str):
            raise EditKept("no_prompt: the answer continues a message that is not a text")
        return [*messages[:-1], cast(Json, last) | {"content": begin + text}]
    if request.get("add_generation_prompt") is False:
        raise EditKept("no_prompt: the answer does not begin a message (add_generation_prompt)")
    return [*messages, {"role": "assistant", "content": text}]


def _other(text: str) -> str:
    """Return one letter that differs from the first and the last character of `text`. One
    conversation is rendered with `text`, and once more with this letter. Tokens next to the text
    that both renderings share are written by the chat template.

    >>> _other("It is 7."), _other("x is y")
    ('x', 'z')
    """
    core = text.strip() or text
    return next(letter for letter in "xyz" if letter not in (core[0], core[-1]))


def edited_response(answer: RecordedAnswer, rendered: Sequence[Sequence[int]]) -> list[int]:
    """Return the token ids of an edit, as a response to the recorded prompt. `rendered` has the ids
    that the requests of `tokenize_requests` returned.

    The response ends with the token that ended the served answer, if the chat template writes this
    token after an answer. Otherwise it ends with everything that the template writes after an
    answer. Raises EditKept in three cases:

    * The rendered ids do not begin with the recorded prompt.
    * Before the edit, the template writes tokens that are not at the beginning of the served
      answer, such as an empty block of reasoning.
    * The edit itself contains the token that the template writes after an answer.

    >>> answer = RecordedAnswer([1, 2], [7, 0])
    >>> edited_response(answer, [[1, 2, 8, 0, 9], [1, 2, 5, 0, 9]])
    [8, 0]
    >>> edited_response(answer, [[1, 2, 8, 3]])
    [8, 3]
    """
    ids, start = list(rendered[0]), len(answer.prompt_ids)
    if ids[:start] != list(answer.prompt_ids):
        raise EditKept("chat_template: the edit is rendered with another prompt")
    response = ids[start:]
    if not response:
        raise EditKept("chat_template: the edit is rendered without a token")
    head = _num_common(one[start:] for one in rendered) if len(rendered) > 1 else 0
    if response[:head] != list(answer.response_ids[:head]):
        raise EditKept("chat_template: it writes tokens before an edit, but not before the answer")
    if response == list(answer.response_ids):
        raise EditKept("same_text: the edit has the tokens of the answer")
    end = answer.response_ids[-1]
    tail = _num_common(one[start:][::-1] for one in rendered) if len(rendered) > 1 else 0
    for at in range(len(response) - tail, len(response)):
        if response[at] == end:
            if end in response[:at]:
                raise EditKept("end_token: the edit contains the token that ends an answer")
            return response[: at + 1]
    return response


def _num_common(lists: Iterable[Sequence[int]]) -> int:
    """Return the number of ids that all `lists` have in common at their beginning."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def demonstrations(
    loss: str, answer: RecordedAnswer, response_ids: Sequence[int]
) -> list[DemonstrationIds]:
    """Return the demonstrations that train a user's edit with the loss `loss` (`sft` or `dpo`).
    `response_ids` are the token ids of the edit. For `dpo`, the served answer is the rejected
    response."""
    prompt_ids = pack_ids(answer.prompt_ids)
    edit = pack_ids(response_ids)
    if loss == "sft":
        return [DemonstrationIds(kind="plain", prompt_ids=prompt_ids, response_ids=edit)]
    assert loss == "dpo", f"no demonstrations of edits for {loss}"
    served = pack_ids(answer.response_ids)
    return [
        DemonstrationIds(kind="chosen", prompt_ids=prompt_ids, response_ids=edit),
        DemonstrationIds(kind="rejected", prompt_ids=prompt_ids, response_ids=served),
    ]
