"""The pages Groups (a search through all groups) and Group (one request with its answers)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.page_texts import MAX_CHARS, MAX_PAGE_CHARS, PageTexts
from fakevllm.console.sources.dataset_rows import DatasetRows
from fakevllm.console.text_differences import mark_differences
from fakevllm.console.token_panel import missing_tokens
from fakevllm.ledger.group_reads import NEWEST, GroupKey, GroupPage, GroupSearch
from fakevllm.ledger.records import GroupRecord, SiblingRecord, State
from fakevllm.sessions.types import Evidence

GROUPS_PER_PAGE = 50
MAX_FIELD_CHARS = 500
"""Maximum length of a field of the search."""
MAX_LIVE_SEARCH_S = 1.0
"""Maximum seconds of a search whose page shows new groups by itself. A slower search would keep the
machine busy for as long as the page is open."""
_TEXT_FIELDS = ("text", "state", "hook", "session")
_REWARD_FIELDS = ("min_reward", "max_reward")


class SearchError(Exception):
    """Raised for a search that cannot be understood. The message says which field is wrong."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the pages Groups and Group."""
    routes = APIRouter()
    settings = parts.settings
    rows = DatasetRows(parts.ledger, settings.datasets, settings.dataset_field)

    @routes.get("/groups")
    def groups(request: Request) -> Response:
        fields = {name: value[:MAX_FIELD_CHARS] for name, value in request.query_params.items()}
        problem, found, status = "", GroupPage(), 200
        search, after = GroupSearch(), NEWEST
        begin = parts.clock()
        try:
            search, after = parse_search(fields)
            with parts.ledger.reading():
                found = parts.ledger.groups.search(search, GROUPS_PER_PAGE, after)
        except SearchError as error:  # translates: the page shows the sentence
            problem, status = str(error), 400
        return parts.page(
            request,
            "groups.html",
            status=status,
            fields={name: fields.get(name, "") for name in (*_TEXT_FIELDS, *_REWARD_FIELDS)},
            states=list(State),
            found=found,
            problem=problem,
            own_url=_url_with(fields, fields.get("after", "")),
            first_url=_url_with(fields, ""),
            older_url=_older_url(fields, found),
            is_first=after == NEWEST,
            is_filtered=not search.is_empty,
            is_slow=parts.clock() - begin > MAX_LIVE_SEARCH_S,
            names=parts.app_names(),
        )

    @routes.get("/groups/{group_id:path}")
    def group(request: Request, group_id: str) -> Response:
        with parts.ledger.reading():
            record = parts.ledger.groups.group(group_id)
            feedback = [] if record is None else parts.ledger.groups.feedback(group_id)
            with_tokens = {one.sibling for one in parts.ledger.calls.versions(group_id)}
            cause = parts.ledger.groups.deletion_cause(group_id)
            # The ledger keeps the id of the task when the contents of a group are deleted.
            task_id = None if record is None or cause is not None else record.task_id
            row_fields = rows.registered(task_id) if task_id else []
        if record is None:
            message = "The ledger has no group with this id: it may be in another ledger."
            return parts.page(request, "message.html", status=404, message=message)
        if row_fields is None and task_id and not settings.redacts:
            row_fields = rows.in_files(task_id)
            if row_fields and parts.server.view().redacts:
                row_fields = []
        reference = reference_answer(record.siblings)
        # Request and answers come first: what is left of the page is for the raw messages.
        texts = PageTexts()
        request_json = texts.json(record.request_json)
        max_chars = min(MAX_CHARS, MAX_PAGE_CHARS // 2 // max(1, len(record.siblings)))
        answers = [texts.cut(sibling.text or "", max_chars) for sibling in record.siblings]
        reference_text = next(
            (
                answer
                for sibling, answer in zip(record.siblings, answers, strict=True)
                if sibling is reference
            ),
            "",
        )
        return parts.page(
            request,
            "group.html",
            group=record,
            answers=sorted(
                zip(record.siblings, mark_differences(answers, reference_text), strict=True),
                key=lambda pair: not pair[0].served,  # the served answer comes first
            ),
            request_json=request_json,
            texts=texts,
            reference=reference,
            facts=group_facts(record, parts.app_name(record.app_key)),
            feedback=feedback,
            with_tokens=with_tokens,
            missing_tokens=missing_tokens(record, cause),
            row_fields=row_fields,
        )

    return routes


def parse_search(fields: Mapping[str, str]) -> tuple[GroupSearch, GroupKey]:
    """Return the search that the fields of a URL describe, and the key (time, id) of the group
    after which the results begin. Raises SearchError with a sentence for the user.

    >>> parse_search({"state": "trained", "min_reward": "0.5"})[0].min_reward
    0.5
    """
    values = {name: fields.get(name, "").strip() for name in _TEXT_FIELDS}
    for name, value in values.items():
        if "\0" in value:  # SQLite would search only for the text before it
            raise SearchError(f"The field {name} has a NUL character: remove it.")
    if values["state"] and values["state"] not in set(State):
        raise SearchError(f"{values['state']} is not a state: choose one of {', '.join(State)}.")
    low, high = (_reward(name, fields.get(name, "").strip()) for name in _REWARD_FIELDS)
    if low is not None and high is not None and low > high:
        raise SearchError("The lowest reward is above the highest one: exchange them.")
    search = GroupSearch(
        values["text"], values["state"], low, high, values["hook"], values["session"]
    )
    return search, _key(fields.get("after", ""))


def _reward(name: str, text: str) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:  # translates
        value = math.nan
    if value is not None and not math.isfinite(value):
        which = "lowest" if name == "min_reward" else "highest"
        raise SearchError(f"The {which} reward {text} is not a number: write one such as 0.5.")
    return value


def _key(text: str) -> GroupKey:
    if not text:
        return NEWEST
    time_text, _, group_id = text.partition("_")
    try:
        return float(time_text), group_id
    except ValueError:  # translates
        raise SearchError("The link to this page is broken: begin with the first page.") from None


def _url_with(fields: Mapping[str, str], after: str) -> str:
    names = (*_TEXT_FIELDS, *_REWARD_FIELDS)
    query = {name: fields[name] for name in names if fields.get(name)}
    query |= {"after": after} if after else {}
    return f"/groups?{urlencode(query)}" if query else "/groups"


def _older_url(fields: Mapping[str, str], found: GroupPage) -> str | None:
    if found.next_key is None:
        return None
    received_at, group_id = found.next_key
    return _url_with(fields, f"{received_at!r}_{group_id}")


def reference_answer(siblings: Sequence[SiblingRecord]) -> SiblingRecord | None:
    """Return the answer with which the others are compared: the one that the app got. If the app
    got none, return the first answer with a text."""
    served = [sibling for sibling in siblings if sibling.served]
    with_text = [sibling for sibling in siblings if sibling.text]
    return next(iter(served or with_text), None)


def group_facts(group: GroupRecord, app: str) -> list[tuple[str, str]]:
    """Return the facts about a group as pairs of texts. Facts without a value are left out."""
    chance = None if group.propensity is None else f"{group.propensity:.0%}"
    facts: list[tuple[str, object]] = [
        ("app", app),
        ("model", group.model),
        ("route", f"{group.route}{', streamed' if group.streamed else ''}"),
        ("status", group.status),
        ("time to answer", f"{group.latency_s:.2f} s"),
        ("served by", group.served_by),
        ("chance to be served", chance),
        ("siblings requested", group.num_siblings),
        ("fewer siblings because", group.cut),
        ("task", group.task_id),
        ("hooks", group.hook_hash),
        ("job", group.job_hash),
        ("run", group.run_id),
        ("collected in step", group.step),
        ("trained in step", group.trained_step),
        ("made version", group.trained_version),
        ("arm", group.arm),
        ("place in the session", _place(group)),
        ("retries answered", group.num_resent or None),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _place(group: GroupRecord) -> str | None:
    if group.turn is None:
        return None
    evidence = "" if group.evidence in (None, Evidence.NONE) else f", by {group.evidence}"
    return f"turn {group.turn}, {group.kind}{evidence}"
