"""Send users' edits of answers to the server as demonstrations. An edit is sent only after the
server's decision about the answer's group is known.

Feedback with an edit may also have a value. The value is trained independently of the edit. The
server accepts the demonstrations of each edit at most once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import aiohttp
import orjson

from fakevllm.config.reward import FeedbackSection
from fakevllm.errors import LedgerError
from fakevllm.ledger.edit_rows import edit_name
from fakevllm.ledger.records import FeedbackRecord, FeedbackState, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.release.arms import OTHER_ARM
from fakevllm.settlement.edit_demonstrations import (
    EditKept,
    RecordedAnswer,
    check_message,
    check_text,
    demonstrations,
    edited_response,
    tokenize_requests,
)
from fakevllm.settlement.held_out_groups import HELD_OUT, HeldOutGroups
from fakevllm.settlement.reward_delivery import ALREADY_ACCEPTED, reason_of
from fakevllm.settlement.sending_loop import TRAINED_ARMS, Candidate, SendingLoop, outcome_of
from fakevllm.swarm.errors import describe_error, is_transient
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.swarm import AddDemonstrationRequest

log = logging.getLogger("fakevllm.settlement.feedback_to_reward")

_BUSY = (408, 429)
"""HTTP statuses of an engine that may render the same text later."""
_FAILED = 500
"""HTTP status of an engine that fails on a text. It would fail again."""
_UNKNOWN_ROUTE = 404
"""HTTP status of the reply of a server that is too old to train edits."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """An edit that may be trained, with the answer that it corrects."""

    text: str
    answer: RecordedAnswer
    request: dict[str, Any]
    """The request in the engine's format."""
    run_id: str


class EditSamples:
    """The background task that sends edits to the server as demonstrations."""

    def __init__(
        self,
        settings: FeedbackSection,
        ledger: Ledger,
        link: SwarmLink,
        held_out: HeldOutGroups,
    ) -> None:
        """Create the background task. `held_out` finds the groups that quote a held-out row. Such
        groups must not be trained."""
        self._loss = settings.edits
        self._ledger = ledger
        self._link = link
        self._held_out = held_out
        self._started_at = time.time()
        self._loop = SendingLoop("an edit", link.serving, self._waiting, self._send)

    @property
    def first_state(self) -> FeedbackState | None:
        """State in which a new edit is stored; None if edits are not trained."""
        return None if self._loss == "keep" else FeedbackState.WAITING

    def wake(self) -> None:
        """Wake the background task, so that it looks for edits to send."""
        self._loop.wake()

    def group_settled(self, group_id: str) -> None:
        """Record that the server's decision about a group is known. If an edit of the group's
        answer waited for this decision, wake the background task, which then sends the edit."""
        self._loop.group_settled(group_id)

    async def run(self) -> None:
        """Send edits to the server until cancelled."""
        await self._loop.run()

    async def _waiting(self) -> list[Candidate]:
        await self._ledger.flush()
        return await asyncio.to_thread(self._ledger.edits.waiting, self._started_at)

    async def _send(self, group_id: str, feedback_id: str) -> None:
        """Send one edit to the server, if it can be trained. Otherwise record the reason. Raises an
        error if a later attempt may succeed."""
        row = await asyncio.to_thread(self._find_waiting, group_id, feedback_id)
        if row is None:
            return
        try:
            request = await self._request(row)
        except EditKept as kept:
            self._ledger.edits.set_outcome(row, FeedbackState.KEPT, str(kept))
            return
        # Read the edit once more: it may have been taken back meanwhile.
        if not await self._ledger.flush():
            raise LedgerError("the ledger cannot be written")
        if await asyncio.to_thread(self._find_waiting, group_id, feedback_id) is None:
            return
        self._ledger.edits.set_outcome(row, *await self._add(request, group_id))

    def _find_waiting(self, group_id: str, feedback_id: str) -> FeedbackRecord | None:
        row = self._ledger.feedback.find(group_id, feedback_id)
        return row if row is not None and row.edit_state == FeedbackState.WAITING else None

    async def _request(self, row: FeedbackRecord) -> AddDemonstrationRequest:
        """Return the request that sends an edit. Raises EditKept if the edit cannot be trained.
        Raises one of NETWORK_ERRORS if the engine cannot be asked now."""
        if self._loss == "keep":  # an earlier proxy process trained edits
            raise EditKept("turned_off: feedback.edits is `keep`")
        edit = await asyncio.to_thread(self._read, row)
        if await self._held_out.contains(row.group_id, edit.text):
            raise EditKept(HELD_OUT)
        response_ids = await self._response_ids(edit)
        return AddDemonstrationRequest(
            sample_id=edit_name(row.group_id, row.feedback_id),
            run_id=edit.run_id,
            demonstrations=demonstrations(self._loss, edit.answer, response_ids),
        )

    def _read(self, row: FeedbackRecord) -> _Edit:
        """Read the answer that an edit corrects. Raises EditKept if the edit cannot be trained."""
        ledger = self._ledger
        if ledger.forgotten.contains(row.group_id):
            raise EditKept(FORGOTTEN)
        if ledger.feedback.arm_of(row.group_id) not in TRAINED_ARMS:
            raise EditKept(OTHER_ARM)
        try:
            group = ledger.group(row.group_id)
            served = ledger.feedback.served_calls(row.group_id)
            if group is None:
                raise EditKept("not_in_ledger: the answer's group was not written")
            served_sibling = next((one for one in group.siblings if one.served), None)
            text = check_text(row.edited, served_sibling and served_sibling.text)
            if served_sibling is not None and served_sibling.message_json is not None:
                check_message(orjson.loads(served_sibling.message_json))
            answer = RecordedAnswer.of(served.calls)
            self._check_redaction(group, text)
            request: Any = ledger.chat_request(group) or orjson.loads(group.request_json)
            if not isinstance(request, dict):
                raise TypeError("the request is not a JSON object")
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # translated
            raise EditKept(f"damaged: {type(error).__name__} when the answer was read") from error
        return _Edit(text, answer, cast(dict[str, Any], request), served.run_id or "")

    def _check_redaction(self, group: GroupRecord, text: str) -> None:
        """Raise EditKept if the present settings redact a text of the request, the served answer or
        its edit. These texts may have been stored before redaction was turned on."""
        edited = [
            replace(sibling, text=text, message_json=None, tool_calls_json=None)
            for sibling in group.siblings
            if sibling.served
        ]
        for record in (group, replace(group, siblings=edited)):
            hidden = self._ledger.parts_to_redact(record)
            if hidden.has_request or group.served_index in hidden.siblings:
                raise EditKept("redacted: the request, the answer or the edit is redacted now")

    async def _response_ids(self, edit: _Edit) -> list[int]:
        """Ask the engine for the token ids of an edit. Raises EditKept if the engine refuses the
        request. Also raises EditKept if the ids do not fit the recorded answer, or if the model's
        context is too short for them."""
        rendered: list[list[int]] = []
        max_model_len: int | None = None
        for body in tokenize_requests(edit.request, edit.text):
            try:
                reply = await self._link.tokenize(body)
            except aiohttp.ClientResponseError as error:  # translated
                if error.status in _BUSY or (is_transient(error) and error.status != _FAILED):
                    raise
                raise EditKept(f"not_tokenized: the engine answers {error.status}") from error
            except ValueError as error:  # translated
                raise EditKept("not_tokenized: the engine's answer has no token ids") from error
            rendered.append(reply.tokens)
            max_model_len = reply.max_model_len
        response_ids = edited_response(edit.answer, rendered)
        num_tokens = len(edit.answer.prompt_ids) + len(response_ids)
        if max_model_len is not None and num_tokens > max_model_len:
            raise EditKept(f"too_long: {num_tokens} tokens, and the model takes {max_model_len}")
        return response_ids

    async def _add(
        self, request: AddDemonstrationRequest, group_id: str
    ) -> tuple[FeedbackState, str | None]:
        try:
            reply = await self._link.add_demonstration(request)
        except Exception as error:  # isolates: one odd edit must not hold up the others
            if is_transient(error):
                raise
            status = error.status if isinstance(error, aiohttp.ClientResponseError) else None
            if status == ALREADY_ACCEPTED:
                # An earlier attempt was accepted with other token ids. These are trained, and the
                # run log reports the rest of the outcome.
                return FeedbackState.POOLED, None
            if status == _UNKNOWN_ROUTE:
                return FeedbackState.KEPT, "old_server: update fakevllm-server to train edits"
            log.warning(
                "the edit of the answer to %s is lost: the swarm server %s",
                group_id,
                describe_error(error),
                extra={"group": group_id},
            )
            return FeedbackState.LOST, reason_of(error)
        return outcome_of(reply)
