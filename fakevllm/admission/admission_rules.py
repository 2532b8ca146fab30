"""Admission rules: decide whether a request is fanned out and trained, or only served. A request
that is fanned out is sampled several times; the sampled answers are called siblings. A request that
is only served is sampled once. This module does no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, cast

from fakevllm.admission.side_calls import (
    MARKERS,
    SessionSummary,
    SideCallRules,
    has_header,
    messages_of,
    opening_of,
)
from fakevllm.config.policy import PolicySection, SkipRule

Json = dict[str, Any]

MAX_SEARCHED_CHARS = 10_000
"""A rule's regular expression is searched only in this number of characters at the beginning of the
first message. The number is limited because a search in a long text can be slow."""

_NON_SAMPLING_FIELDS = ("echo", "suffix", "use_beam_search", "prompt_logprobs")
_IMAGE_TYPES = ("image_url", "input_image", "image")


class ServeOnlyReason(StrEnum):
    """Reason why a request is sampled once and not trained. The ledger (the proxy's database)
    stores the value of the reason. If the reason has a detail, the ledger stores the value, a colon
    and the detail.

    If the proxy cannot read or translate a request, the reason is `invalid_json` or
    `not_translated`. The request is passed on unchanged, and the engine answers or refuses it. If
    the fallback server answers, the reason is `fallback` with the reason why the engine gave no
    answer, such as `fallback: engine_busy`."""

    PAUSED = "paused"
    """The kill switch is on."""
    SIDE_CALL = "side_call"
    """A rule classified the request as a side call, such as title generation. The detail is the
    name of the rule."""
    SKIP_RULE = "skip_rule"
    """A `[[policy.skip]]` rule matched. The detail is the rule's name or number."""
    HELD_OUT = "held_out"
    """The request quotes a row of the held-out dataset."""
    NOT_SAMPLED = "not_sampled"
    """The request is outside the fraction of the traffic that is trained."""
    ONE_SIBLING = "one_sibling"
    """Only one answer would be sampled for the request, so there is no other answer to compare it
    with. One cause is that there are no hooks."""
    SEVERAL_PROMPTS = "several_prompts"
    """The request has a list of prompts."""
    INVALID_REQUEST = "invalid_request"
    """The request has neither messages nor a prompt."""
    GREEDY_REQUEST = "greedy_request"
    """The app requested temperature 0."""
    SEVERAL_CHOICES_ASKED = "several_choices_asked"
    """The app requested more than one choice: its `n` is above 1."""
    NOT_A_SAMPLE = "not_a_sample"
    """The request uses `echo`, `suffix`, `use_beam_search` or `prompt_logprobs`, so its answer is
    not a plain sample of the model."""
    AT_MOST_ONE_TOKEN = "at_most_one_token"
    """The request allows at most one token (`max_tokens` of 0 or 1), as checks of a connection
    do."""
    NOT_STORED = "not_stored"
    """Nothing of the request may be stored. The ledger has no row of it, but metrics count it."""
    SERVER_DOES_NOT_REDACT = "server_does_not_redact"
    """The proxy redacts, and the server does not redact the same texts. The server would store the
    tokens of a captured call."""


@dataclass(frozen=True, slots=True)
class Train:
    """Decision of the admission rules to sample several answers to the request, and to train them.

    The decision is not final. If `why_only_served` returns a reason for the request's body, the
    request is sampled once and not trained.
    """

    num: int | None = None
    """Number of siblings (answers to sample); None means the number in the training job."""
    shadow: bool = False
    """Whether the app gets the answer to its own, unchanged request even if another sibling has a
    higher reward."""


@dataclass(frozen=True, slots=True)
class ServeOnly:
    """Decision of the admission rules to sample the request once and not to train it."""

    reason: ServeOnlyReason
    detail: str = ""

    @property
    def is_side_call(self) -> bool:
        return self.reason is ServeOnlyReason.SIDE_CALL

    @property
    def recorded_reason(self) -> str:
        """Reason why the request is not trained, in the form that the ledger (the proxy's database)
        stores. If the reason has a detail, the detail follows, as in `side_call: marker`."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason.value


Ruling = Train | ServeOnly
TRAIN = Train()


def is_shadow(ruling: Ruling) -> bool:
    """Return True if several answers are sampled in shadow mode. In shadow mode, the app gets the
    answer to its own, unchanged request even if another sampled answer has a higher reward."""
    return isinstance(ruling, Train) and ruling.shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """The facts about a request that the admission rules use, known before anything is sampled."""

    route: str
    """Name of the API format, such as `chat`."""
    model: str
    """Model name as the app sent it."""
    headers: Mapping[bytes, bytes]
    """Headers of the app, with names in lower case."""
    body: Json
    """Body in the format of chat completions or completions."""
    key_names: tuple[str, ...] = ()
    """Names by which a rule may refer to the app's API key: the key's name in the key file and the
    key's fingerprint."""


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The admission rules of the configuration section `[policy]`. They decide which requests are
    trained."""

    settings: PolicySection
    side_calls: SideCallRules = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        rules = SideCallRules(
            settings.side_models,
            settings.side_headers,
            (*MARKERS, *settings.side_markers),
            settings.side_rules,
        )
        object.__setattr__(self, "side_calls", rules)  # the dataclass is frozen

    def side_call(self, facts: RequestFacts, session: SessionSummary | None) -> ServeOnly | None:
        """If the request is a side call, return the decision not to train the request. Return None
        for a main call (a request of the user or the agent). A side call is a request that the
        client program makes on its own, such as title generation.

        `session`: summary of the earlier main calls in the same session (conversation). None means
        that there are no earlier main calls.
        """
        rule = self.side_calls.matching_rule(facts.model, facts.headers, facts.body, session)
        return None if rule is None else ServeOnly(ServeOnlyReason.SIDE_CALL, rule)

    def decide(
        self,
        facts: RequestFacts,
        subject: str,
        *,
        is_paused: bool = False,
        is_held_out: Callable[[], bool] = lambda: False,
    ) -> Ruling:
        """Return the decision whether a main call (a request of the user or the agent) is trained.

        `subject`: id of the request's session (conversation), or id of the request if it has no
        session. If only a fraction of the traffic is trained, the fraction is chosen by subject.
        Therefore all requests of a session are treated alike.

        `is_paused`: True if the kill switch is on, which stops training on all requests.

        `is_held_out`: function that returns True if the request quotes a row of the held-out
        dataset. The function reads the whole request, so it is called only if no cheaper rule
        decides.
        """
        if is_paused:
            return ServeOnly(ServeOnlyReason.PAUSED)
        for number, skip in enumerate(self.settings.skip, start=1):
            if _matches(skip, facts):
                return ServeOnly(ServeOnlyReason.SKIP_RULE, skip.name or str(number))
        if is_held_out():
            return ServeOnly(ServeOnlyReason.HELD_OUT)
        if not is_sampled(subject, self.settings.sample_fraction):
            return ServeOnly(ServeOnlyReason.NOT_SAMPLED)
        num = self.settings.n.get(facts.model, self.settings.n.get(facts.route))
        return Train(num, self.settings.shadow)


def is_sampled(subject: str, fraction: float) -> bool:
    """Return True if the requests of a subject (a session or a single request) are trained.
    `subject` is the subject's id, and `fraction` is the share of all subjects that are trained.

    The result depends on the two arguments only. If the result for a subject is True, it stays True
    for every larger fraction.

    >>> [is_sampled(name, 0.5) for name in ("a", "b", "a")]
    [True, False, True]
    """
    if fraction >= 1:
        return True
    drawn = hashlib.blake2b(subject.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(drawn) < fraction * 2**64


def why_only_served(body: Json, num_siblings: int) -> ServeOnlyReason | None:
    """Return the reason why a request cannot be trained, or None if it can be trained.

    The reason depends on the request's body and on the number of siblings (answers to sample). A
    request that cannot be trained is sampled once.
    """
    if num_siblings < 2:
        return ServeOnlyReason.ONE_SIBLING
    if not _has_one_prompt(body):
        has_prompt = bool(body.get("prompt"))
        return ServeOnlyReason.SEVERAL_PROMPTS if has_prompt else ServeOnlyReason.INVALID_REQUEST
    if body.get("temperature") == 0:
        return ServeOnlyReason.GREEDY_REQUEST
    if body.get("n") not in (None, 1):
        return ServeOnlyReason.SEVERAL_CHOICES_ASKED
    if any(body.get(name) for name in _NON_SAMPLING_FIELDS) or body.get("prompt_logprobs") == 0:
        return ServeOnlyReason.NOT_A_SAMPLE
    max_tokens = _max_tokens(body)
    if max_tokens is not None and max_tokens in (0, 1):
        return ServeOnlyReason.AT_MOST_ONE_TOKEN
    return None


def _matches(rule: SkipRule, facts: RequestFacts) -> bool:
    """Return True if the request satisfies all conditions of this `[[policy.skip]]` rule."""
    pattern = rule.first_message_pattern
    return (
        rule.route in (None, facts.route)
        and (rule.model is None or fnmatchcase(facts.model, rule.model))
        and (rule.header is None or has_header(facts.headers, rule.header))
        and (rule.key is None or rule.key in facts.key_names)
        and (rule.prompt_chars is None or _num_chars(facts.body) > rule.prompt_chars)
        and (rule.images is None or _has_images(facts.body))
        and (
            pattern is None
            or pattern.search(opening_of(facts.body), 0, MAX_SEARCHED_CHARS) is not None
        )
    )


def _num_chars(body: Json) -> int:
    return sum(len(text) for _, text in messages_of(body))


def _has_images(body: Json) -> bool:
    messages: object = body.get("messages")
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        content: object = cast(Json, message).get("content") if isinstance(message, dict) else None
        for part in cast(list[Any], content) if isinstance(content, list) else ():
            if isinstance(part, dict) and cast(Json, part).get("type") in _IMAGE_TYPES:
                return True
    return False


def _has_one_prompt(body: Json) -> bool:
    """Return True if the body has messages or exactly one prompt. A prompt is a text or a list of
    token ids."""
    messages: object = body.get("messages")
    prompt: object = body.get("prompt")
    if isinstance(messages, list):
        return messages != []
    if isinstance(prompt, list):
        ids = cast(list[object], prompt)
        return ids != [] and all(isinstance(id, int) for id in ids)
    return isinstance(prompt, str) and bool(prompt)


def _max_tokens(body: Json) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")
