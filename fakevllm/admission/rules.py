"""Train this request or only serve it? Pure: what is known comes in, the reason comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
"""Of a first message: a regular expression may take its time with a long text."""

_NOT_A_SAMPLE = ("echo", "suffix", "use_beam_search", "prompt_logprobs")
_IMAGES = ("image_url", "input_image", "image")


class ServeOnlyReason(StrEnum):
    """Why a request is sampled once and not trained. The ledger stores the value, and a detail
    behind a colon where there is one."""

    PAUSED = "paused"
    SIDE_CALL = "side_call"
    """The detail is the rule by which the request is a side call."""
    SKIP_RULE = "skip_rule"
    """The detail is the rule's name or number."""
    NOT_SAMPLED = "not_sampled"
    ONE_SIBLING = "one_sibling"
    SEVERAL_PROMPTS = "several_prompts"
    INVALID_REQUEST = "invalid_request"
    GREEDY_REQUEST = "greedy_request"
    SEVERAL_CHOICES_ASKED = "several_choices_asked"
    NOT_A_SAMPLE = "not_a_sample"
    AT_MOST_ONE_TOKEN = "at_most_one_token"


@dataclass(frozen=True, slots=True)
class Train:
    """Fanned out, if its body allows it (`why_only_served`)."""

    num: int | None = None
    """Siblings; None: as many as the job says."""
    shadow: bool = False
    """The app gets the answer to its own request, as without us."""


@dataclass(frozen=True, slots=True)
class ServeOnly:
    """Sampled once."""

    reason: ServeOnlyReason
    detail: str = ""

    @property
    def is_side_call(self) -> bool:
        return self.reason is ServeOnlyReason.SIDE_CALL

    @property
    def recorded_reason(self) -> str:
        """The reason as the ledger stores it, such as `side_call: marker`."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason.value


Ruling = Train | ServeOnly
TRAIN = Train()


def is_shadow(ruling: Ruling) -> bool:
    return isinstance(ruling, Train) and ruling.shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known of a request before anything is sampled."""

    route: str
    """The format's name."""
    model: str
    """As the app names it."""
    headers: Mapping[bytes, bytes]
    """Names in lower case."""
    body: Json
    """In the form of chat completions or completions."""
    key_names: tuple[str, ...] = ()
    """What the app's key is called: its name, its fingerprint."""


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """`[policy]`, ready to be asked."""

    settings: PolicySection
    side_calls: SideCallRules = field(init=False)

    def __post_init__(self) -> None:
        own = self.settings
        rules = SideCallRules(
            own.side_models, own.side_headers, (*MARKERS, *own.side_markers), own.side_rules
        )
        object.__setattr__(self, "side_calls", rules)  # frozen

    def side_call(self, asked: RequestFacts, session: SessionSummary | None) -> ServeOnly | None:
        """`session`: the main calls before it, where there were any."""
        rule = self.side_calls.matching_rule(asked.model, asked.headers, asked.body, session)
        return None if rule is None else ServeOnly(ServeOnlyReason.SIDE_CALL, rule)

    def decide(self, asked: RequestFacts, subject: str, *, is_paused: bool = False) -> Ruling:
        """Of a main call. `subject`: what is drawn as one, its session or its own id."""
        if is_paused:
            return ServeOnly(ServeOnlyReason.PAUSED)
        for number, skip in enumerate(self.settings.skip, start=1):
            if _is_skipped(skip, asked):
                return ServeOnly(ServeOnlyReason.SKIP_RULE, skip.name or str(number))
        if not is_sampled(subject, self.settings.sample_fraction):
            return ServeOnly(ServeOnlyReason.NOT_SAMPLED)
        num = self.settings.n.get(asked.model, self.settings.n.get(asked.route))
        return Train(num, self.settings.shadow)


def is_sampled(subject: str, fraction: float) -> bool:
    """The same for the same subject, whenever it is asked; a larger fraction keeps whom a smaller
    one took.

    >>> [is_sampled(name, 0.5) for name in ("a", "b", "a")]
    [True, False, True]
    """
    if fraction >= 1:
        return True
    drawn = hashlib.blake2b(subject.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(drawn) < fraction * 2**64


def why_only_served(body: Json, num_siblings: int) -> ServeOnlyReason | None:
    """Return why a request is served once and not trained, None where it is fanned out."""
    if num_siblings < 2:
        return ServeOnlyReason.ONE_SIBLING
    if not _asks_one(body):
        has_prompt = bool(body.get("prompt"))
        return ServeOnlyReason.SEVERAL_PROMPTS if has_prompt else ServeOnlyReason.INVALID_REQUEST
    if body.get("temperature") == 0:
        return ServeOnlyReason.GREEDY_REQUEST
    if body.get("n") not in (None, 1):
        return ServeOnlyReason.SEVERAL_CHOICES_ASKED
    if any(body.get(name) for name in _NOT_A_SAMPLE) or body.get("prompt_logprobs") == 0:
        return ServeOnlyReason.NOT_A_SAMPLE
    if _limit(body) is not None and _limit(body) in (0, 1):
        return ServeOnlyReason.AT_MOST_ONE_TOKEN
    return None


def _is_skipped(rule: SkipRule, asked: RequestFacts) -> bool:
    """Whether all is so that the rule names."""
    pattern = rule.first_message_pattern
    return (
        rule.route in (None, asked.route)
        and (rule.model is None or fnmatchcase(asked.model, rule.model))
        and (rule.header is None or has_header(asked.headers, rule.header))
        and (rule.key is None or rule.key in asked.key_names)
        and (rule.prompt_chars is None or _num_chars(asked.body) > rule.prompt_chars)
        and (rule.images is None or _has_images(asked.body))
        and (
            pattern is None
            or pattern.search(opening_of(asked.body), 0, MAX_SEARCHED_CHARS) is not None
        )
    )


def _num_chars(body: Json) -> int:
    return sum(len(text) for _, text in messages_of(body))


def _has_images(body: Json) -> bool:
    messages: object = body.get("messages")
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        content: object = cast(Json, message).get("content") if isinstance(message, dict) else None
        for part in cast(list[Any], content) if isinstance(content, list) else ():
            if isinstance(part, dict) and cast(Json, part).get("type") in _IMAGES:
                return True
    return False


def _asks_one(body: Json) -> bool:
    """One conversation, or one prompt as text or token ids."""
    messages: object = body.get("messages")
    prompt: object = body.get("prompt")
    if isinstance(messages, list):
        return messages != []
    if isinstance(prompt, list):
        ids = cast(list[object], prompt)
        return ids != [] and all(isinstance(id, int) for id in ids)
    return isinstance(prompt, str) and bool(prompt)


def _limit(body: Json) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")
