"""The page Feedback: rate and correct answers, and see the outcome of the latest feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import RedirectResponse

from fakevllm.console.access.login import Login
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.feedback_sentences import (
    baseline_sentence,
    edit_sentence,
    step_sentence,
    tokens_sentence,
    value_sentence,
)
from fakevllm.console.page_renderer import FRAGMENT_HEADER, path_part
from fakevllm.console.pages.groups import SearchError, parse_search, reference_answer
from fakevllm.errors import ConfigError
from fakevllm.ledger.feedback_reads import FeedbackOutcome
from fakevllm.ledger.group_reads import NEWEST, GroupPage, GroupSearch
from fakevllm.ledger.records import GroupRecord
from fakevllm.runtime.admin_client import send_feedback
from fakevllm_adapters.protocol.keys import fingerprint

ANSWERS_PER_PAGE = 10
NUM_LATEST = 30
"""Number of items of feedback on the page."""
MAX_OF_GROUP = 20
"""Maximum number of items of feedback that are shown about one answer."""
MAX_EDITED_CHARS = 100_000
"""Maximum length of an answer that can be corrected on the page. A form has up to nine bytes for a
character, and the console refuses larger forms."""


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """An answer, and the web form with which a user rates and corrects it."""

    group: GroupRecord
    text: str
    """The text of the answer that the app received."""
    tool_calls_json: str | None
    edited: str
    """The text in the editor."""
    comment: str = ""
    problem: str = ""
    """Why the form could not be sent. Empty if it was not sent yet."""
    training_problem: str = ""
    """Why feedback about the answer will not be trained. Empty if it can be trained."""
    is_deleted: bool = False
    """Whether the contents of the group were deleted. The answer can then not be rated."""

    @property
    def has_editor(self) -> bool:
        return bool(self.text) and len(self.text) <= MAX_EDITED_CHARS


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Feedback."""
    routes = APIRouter()
    login = Login(parts)
    settings = parts.settings
    own_key = fingerprint(settings.proxy_key) if settings.proxy_key else None
    sentences: dict[str, Any] = {
        "value_sentence": partial(value_sentence, num_needed=settings.num_for_baseline),
        "edit_sentence": edit_sentence,
    }

    @routes.get("/feedback")
    def queue(request: Request, after: str = "") -> Response:
        problem, status, found, key = "", 200, GroupPage(), NEWEST
        answers: list[RatedAnswer] = []
        with parts.ledger.reading():
            outcomes = parts.ledger.feedback.latest(NUM_LATEST)
            num_values = parts.ledger.feedback.num_values(own_key)
            try:
                key = parse_search({"after": after})[1]
                if FRAGMENT_HEADER not in request.headers:
                    search = GroupSearch(is_unrated=True)
                    found = parts.ledger.groups.search(search, ANSWERS_PER_PAGE, key)
                    groups = (parts.ledger.groups.group(row.group_id) for row in found.rows)
                    answers = [_rated(group) for group in groups if group is not None]
            except SearchError as error:  # translates: the page shows the sentence
                problem, status = str(error), 400
        return parts.page(
            request,
            "feedback.html",
            status=status,
            answers=answers,
            found=found,
            is_first=key == NEWEST,
            outcomes=outcomes,
            names=parts.app_names(),
            problem=problem,
            progress=[
                baseline_sentence(
                    num_values, settings.num_for_baseline, has_key=own_key is not None
                ),
                step_sentence(parts.proxy.view().engine),
            ],
            is_part=FRAGMENT_HEADER in request.headers,
            **sentences,
        )

    @routes.get("/feedback/{group_id:path}")
    def answer(request: Request, group_id: str) -> Response:
        with parts.ledger.reading():
            group = parts.ledger.groups.group(group_id)
            outcomes = parts.ledger.feedback.of_group(group_id, MAX_OF_GROUP)
            if group is None or group.served_index is None:
                return _no_answer(request)
            answer = _rated(group)
        return _answer_page(request, answer, outcomes)

    @routes.post("/feedback/{group_id:path}")
    def send(
        request: Request, group_id: str, form: dict[str, str] = Depends(login.form)
    ) -> Response:
        with parts.ledger.reading():
            group = parts.ledger.groups.group(group_id)
            if group is None or group.served_index is None:
                return _no_answer(request)
            answer = _rated(group, form)
        is_part = FRAGMENT_HEADER in request.headers
        try:
            body = feedback_body(answer, form)
            reply = send_feedback(parts.settings.proxy_url, parts.settings.proxy_key, body)
        except ConfigError as error:  # translates: the form is shown again with the sentence
            answer = replace(answer, problem=str(error))
            if is_part:
                return parts.page(request, "feedback_form.html", status=409, answer=answer)
            with parts.ledger.reading():
                outcomes = parts.ledger.feedback.of_group(group_id, MAX_OF_GROUP)
            return _answer_page(request, answer, outcomes, status=409)
        if not is_part:
            return RedirectResponse(f"/feedback/{path_part(group_id)}", 303)
        with parts.ledger.reading():
            outcomes = parts.ledger.feedback.of_group(group_id, MAX_OF_GROUP)
        return parts.page(
            request,
            "feedback_sent.html",
            answer=answer,
            outcomes=outcomes,
            reply=reply_sentence(reply),
            **sentences,
        )

    def _rated(group: GroupRecord, form: Mapping[str, str] | None = None) -> RatedAnswer:
        """Return the answer of a group with what the ledger knows about its tokens."""
        calls = parts.ledger.calls.versions(group.group_id)
        reasons = [call.untrainable for call in calls if call.sibling == group.served_index]
        return replace(
            rated_answer(group, form),
            training_problem=tokens_sentence(group, reasons),
            is_deleted=parts.ledger.groups.deletion_cause(group.group_id) is not None,
        )

    def _no_answer(request: Request) -> Response:
        message = "The ledger has no answer of this group that an app has received."
        return parts.page(request, "message.html", status=404, message=message)

    def _answer_page(
        request: Request, answer: RatedAnswer, outcomes: list[FeedbackOutcome], status: int = 200
    ) -> Response:
        return parts.page(
            request,
            "feedback_answer.html",
            status=status,
            answer=answer,
            outcomes=outcomes,
            reply="",
            **sentences,
        )

    return routes


def rated_answer(group: GroupRecord, form: Mapping[str, str] | None = None) -> RatedAnswer:
    """Return the answer that the app of a group received. `form` has the fields of the form that
    was sent, or is None if the form is shown for the first time."""
    served = reference_answer(group.siblings)
    text = "" if served is None else served.text or ""
    form = form or {}
    return RatedAnswer(
        group,
        text,
        None if served is None else served.tool_calls_json,
        form.get("edited", text).replace("\r\n", "\n"),
        form.get("comment", ""),
    )


def feedback_body(answer: RatedAnswer, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of POST /v1/feedback for a form. A text is a correction only if it differs
    from the answer. Raises ConfigError if the form has nothing to send."""
    body: dict[str, Any] = {"id": answer.group.group_id, "any_key": True}
    button = form.get("send", "")
    if button == "take_back":
        return body | {"thumbs": None}
    if button in ("up", "down"):
        body["thumbs"] = button
    if answer.has_editor and answer.edited != answer.text.replace("\r\n", "\n"):
        body["edited"] = answer.edited
    if comment := answer.comment.strip():
        body["comment"] = comment
    if len(body) == 2:
        raise ConfigError("Nothing was sent: choose a thumb, or change the text of the answer.")
    return body


def reply_sentence(reply: Mapping[str, Any]) -> str:
    """Return a sentence for the user about the proxy's reply to feedback.

    >>> reply_sentence({"state": "received", "is_repeated": False})
    'The proxy has stored your feedback.'
    """
    if reply.get("is_repeated"):
        return "The proxy had this feedback already."
    reason = reply.get("reason")
    if str(reason).startswith("too_late"):
        return "It is too late to take this feedback back: it counts already."
    return "The proxy has stored your feedback."
