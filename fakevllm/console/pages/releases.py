"""The pages Releases (the versions that may answer apps, and all decisions about them), Decision
(release one version, or let training go back to it) and Hold (stop releases, or allow them)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import RedirectResponse

from fakevllm.console.access.login import Login
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.errors import UserError
from fakevllm.release.evidence_text import difference, ranges
from fakevllm.sdk.release_requests import DecisionTarget
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord, ReleasesReply

MAX_RECORDS = 200
"""Maximum number of decisions on the page, the newest ones."""
MAX_VERSION = 2**53
"""Upper limit for a version in a form. It is the largest number that every JSON parser reads
exactly."""
_NO_VERSION = "This is not a version: write its number, such as 20."


class FormError(Exception):
    """Raised for a form that cannot be understood. The message says what to do."""


@dataclass(frozen=True, slots=True)
class RecordRow:
    """One decision in the table."""

    record: ReleaseRecord
    difference: str
    pairs: str
    evidence_json: str
    """Empty if the decision has no evidence."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the pages Releases, Decision and Hold."""
    routes = APIRouter()
    login = Login(parts)

    @routes.get("/releases")
    def releases(request: Request, decision: str = "") -> Response:
        view = parts.releases.view()
        history = view.history
        records = [] if history is None else history.records
        newest = (parts.proxy.view().engine or {}).get("weight_version")
        return parts.page(
            request,
            "releases.html",
            newest=newest,
            choices=_choices(history, newest),
            history=history,
            problem=view.problem,
            is_gated=parts.proxy.view().is_gated,
            rejected="" if history is None else ranges(sorted(history.rejected)),
            rows=[_row(record) for record in records[: -MAX_RECORDS - 1 : -1]],
            num_left_out=max(0, len(records) - MAX_RECORDS),
            done=_sentence(history, decision),
        )

    @routes.get("/releases/decision")
    def ask(request: Request, version: str = "") -> Response:
        try:
            return page(request, _version(version))
        except FormError as error:
            return parts.page(request, "message.html", status=400, message=str(error))

    @routes.post("/releases/promote")
    def promote(request: Request, form: dict[str, str] = Depends(login.form)) -> Response:
        return decide(request, form, "promote")

    @routes.post("/releases/rollback")
    def roll_back(request: Request, form: dict[str, str] = Depends(login.form)) -> Response:
        return decide(request, form, "rollback")

    @routes.get("/releases/hold")
    def ask_hold(request: Request) -> Response:
        return hold_page(request)

    @routes.post("/releases/hold")
    def hold(request: Request, form: dict[str, str] = Depends(login.form)) -> Response:
        return decide_hold(request, form, parts.releases.hold)

    @routes.post("/releases/resume")
    def resume(request: Request, form: dict[str, str] = Depends(login.form)) -> Response:
        return decide_hold(request, form, parts.releases.resume)

    def decide_hold(
        request: Request, form: dict[str, str], send: Callable[[DecisionTarget], ReleaseRecord]
    ) -> Response:
        """Let the server stop releases or allow them again. `send` sends the decision. After a
        success, show the page Releases. Otherwise show the reason of the failure."""
        try:
            record = send(_target(form))
        except FormError as error:
            return parts.page(request, "message.html", status=400, message=str(error))
        except UserError as error:  # translates: the page shows the sentence
            return hold_page(request, refusal=str(error))
        parts.proxy.forget()  # its status has the hold among the problems
        return RedirectResponse(f"/releases?decision={record.number}", 303)

    def hold_page(request: Request, refusal: str = "") -> Response:
        return decision_page(request, "release_hold.html", refusal)

    def decide(request: Request, form: dict[str, str], action: str) -> Response:
        """Send a form's decision to the server. After a success, show the page Releases. Otherwise
        show the reason of the failure."""
        try:
            version = _version(form.get("version", ""))
            target = _target(form)
        except FormError as error:
            return parts.page(request, "message.html", status=400, message=str(error))
        try:
            if action == "promote":
                force = form.get("force", "") == "yes"
                record = parts.releases.promote(version, target, force=force)
            else:
                record = parts.releases.roll_back(version, target)
        except UserError as error:  # translates: the page shows the sentence
            return page(request, version, refusal=str(error))
        return RedirectResponse(f"/releases?decision={record.number}", 303)

    def page(request: Request, version: int, refusal: str = "") -> Response:
        return decision_page(request, "release_decision.html", refusal, version=version)

    def decision_page(request: Request, template: str, refusal: str, **values: object) -> Response:
        """Return a page with a form for a decision about the run that the server has now."""
        view = parts.releases.view()
        if view.history is None:
            return parts.page(request, "message.html", status=503, message=refusal or view.problem)
        target = DecisionTarget(view.history.run_id)
        return parts.page(
            request,
            template,
            status=409 if refusal else 200,
            history=view.history,
            is_gated=parts.proxy.view().is_gated,
            refusal=refusal,
            decision_id=target.id,
            run_id=target.run_id,
            **values,
        )

    return routes


def _choices(history: ReleasesReply | None, newest: int | None) -> list[int]:
    """Return the versions that can be chosen, newest first. The server saves the newest version
    when it is chosen. Return an empty list if the server is too old to list its versions."""
    if history is None or not history.with_weights:
        return []
    newest_only = set[int]() if newest is None else {newest}
    return sorted({*history.with_weights, *newest_only}, reverse=True)


def _row(record: ReleaseRecord) -> RecordRow:
    pairs = record.evidence.get("pairs")
    return RecordRow(
        record,
        "–" if (figures := difference(record.evidence)) == "-" else figures,
        "–" if pairs is None else str(pairs),
        json.dumps(record.evidence) if record.evidence else "",
    )


def _sentence(history: ReleasesReply | None, number: str) -> str:
    """Return a text that describes the effect of the decision with this number. Return an empty
    text if the history has no such decision, or if the decision was not made by a button of the
    console."""
    records = [] if history is None else history.records
    record = next((one for one in records if str(one.number) == number), None)
    if history is None or record is None:
        return ""
    if record.decision is Decision.RELEASED:
        return f"Version {record.version} is released (decision {record.number})."
    if record.decision is Decision.HOLD:
        return f"Releases are on hold (decision {record.number})."
    if record.decision is Decision.RESUME:
        return f"Versions may be released again (decision {record.number})."
    if "restored" not in record.evidence:
        return ""
    return (
        f"Training goes on from version {record.evidence['restored']} (decision {record.number}). "
        f"Version {history.released} is the released version."
    )


def _version(text: str) -> int:
    """Return the version number that a user has typed. Raises FormError for any other text.

    >>> _version(" 20 ")
    20
    """
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))):
        raise FormError(_NO_VERSION)
    if (version := int(text)) > MAX_VERSION:
        raise FormError(_NO_VERSION)
    return version


def _target(form: dict[str, str]) -> DecisionTarget:
    """Return the decision that the page has prepared, with its id. Because of the id, a form that
    is sent twice makes only one decision."""
    try:
        return DecisionTarget(form.get("run_id") or None, form.get("decision_id", ""))
    except ValueError:  # translates
        message = "This form is not complete: load its page again, and send it once more."
        raise FormError(message) from None
