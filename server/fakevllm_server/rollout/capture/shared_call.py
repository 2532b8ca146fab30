"""Capture of one LLM call that samples several siblings (answers to the same request). Each choice
of the call is a sibling. To capture a call is to record its tokens for training.

Each choice is returned as soon as it is complete, even if other choices are not. Therefore the
engine is asked to stream the choices, or to send each choice when it is complete. Each choice is
captured as a separate call, with its own tokens and usage. The caller gets each choice in the form
of a call with one choice: as a stream, or as a whole answer.

The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.http.complete_choices import SentChoice
from fakevllm_server.rollout.capture.answer_forms import AnswerForms, WholeForm, has_reasoning
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.choice_events import (
    ChoiceEvents,
    ChoiceSplitter,
    EngineStreamError,
    PartReader,
    usage_chunk,
    usage_of,
    whole_answer,
)
from fakevllm_server.types.number_arrays import IdArray

Json = dict[str, Any]

_STREAM_OPTIONS: Json = {"include_usage": True, "continuous_usage_stats": True}
"""Options with which the engine counts the tokens of each choice."""


_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)
"""Errors that can occur while reading a stream that does not have vLLM's form."""


class CannotShare(Exception):
    """Error for a shared call (one call with several choices) whose choices cannot be answered in
    the same way as separate calls. Each choice then needs a call of its own."""


_PARSES_REASONING = "the engine reads the reasoning of a stream differently"


EndedChoice = ChoiceEvents | SentChoice
"""What the engine sent for a choice that has ended: the events of the choice, or the answer
together with the answer's tokens."""


@dataclass(frozen=True, slots=True)
class CompleteChoice:
    """One choice of a call, after its end has been read: its answer and its recorded tokens."""

    index: int
    """Index of the choice in the call."""
    answer: bytes
    """The answer, in the same form as the answer to a call with this choice alone."""
    capture: CallCapture


class SharedCapture:
    """Recorder of the tokens and the answers of one call with several choices."""

    def __init__(
        self,
        path: str,
        body: Json,
        num: int,
        forms: AnswerForms,
        create_capture: Callable[[Json], CallCapture],
    ) -> None:
        """Prepare the capture of a call with `num` choices.

        `path` is the API path at the engine. `body` is the request without its parameter `n`.
        `create_capture` creates the recorder of a call with one choice. Raises CannotShare if the
        choices cannot be answered in the same way as separate calls. This is the case, for example,
        if the form (the fields) of the engine's answers is not known yet.
        """
        self._path = path
        self._num = num
        self.is_streamed = body.get("stream") is True
        self._whole_form = None if self.is_streamed else forms.whole(path)
        self._usage_form = forms.usage_chunk(path) if self.is_streamed else None
        if self._whole_form is None and self._usage_form is None:
            raise CannotShare("the engine has not answered a call with one choice yet")
        self._forms = forms
        if not self.is_streamed and forms.parses_reasoning:
            raise CannotShare(_PARSES_REASONING)
        given: Any = body.get("stream_options") or {}
        if given and not (self.is_streamed and isinstance(given, dict)):
            raise CannotShare("the engine refuses its `stream_options`")
        options = cast(Json, given)
        self._shows_usage_so_far = bool(
            options.get("include_usage") and options.get("continuous_usage_stats")
        )
        self._unused = unused = create_capture(body)
        """A capture that records no answer. It is copied for each choice, because a copy takes less
        time than creating a capture."""
        self.upstream_body: Json = unused.upstream_body() | {
            "stream": True,
            "n": num,
            "stream_options": options | _STREAM_OPTIONS,
        }
        """Request body for an engine that streams the choices."""
        self.complete_body: Json = body | {"n": num}
        """Request body for an engine that sends each choice when it is complete."""
        if unused.requests_allowed:
            self.complete_body["return_allowed_tokens"] = True
        self.hides_prompt_ids = unused.hides_prompt_ids
        """Whether no sibling's answer shows the prompt's token ids."""
        self._prompt_ids: IdArray | None = None
        self._failure: Exception | None = None
        """Error that ended the stream; None while there is none."""
        self._reader: ChoiceSplitter | PartReader = ChoiceSplitter(
            num, removes_prompt_ids=self.hides_prompt_ids
        )

    @property
    def is_complete(self) -> bool:
        """Whether all choices are complete."""
        return self._reader.num_running == 0

    def read_parts(self, content_type: str) -> None:
        """Prepare to read a response that has one part for each choice, instead of an event stream.
        Raises CannotShare if `content_type` is not the type of such a response."""
        try:
            self._reader = PartReader(self._num, content_type)
        except ValueError as error:
            raise _malformed(error) from error

    def use_prompt_ids(self, prompt_ids: IdArray) -> None:
        """Record the prompt's token ids. The engine sends them in front of the choices."""
        self._prompt_ids = prompt_ids

    def feed(self, chunk: bytes) -> list[CompleteChoice]:
        """Read the next bytes of the engine's stream. Return the choices that end in these bytes,
        each with its recorded tokens and its answer. This method combines `split` and
        `complete`."""
        return self.complete(self.split(chunk))

    def split(self, chunk: bytes) -> list[EndedChoice]:
        """Read the next bytes of the engine's response. Return each choice that ends in these
        bytes. Pass the returned list to `complete` before the next call of `split`.

        If an earlier call found an error in the stream, this error is raised.
        """
        if self._failure is not None:
            raise self._failure
        ended: list[EndedChoice] = []
        try:
            ended.extend(self._reader.feed(chunk))
        except EngineStreamError as error:
            self._failure = error
        except _MALFORMED as error:
            self._failure = _malformed(error)
        return ended

    def complete(self, ended: Sequence[EndedChoice]) -> list[CompleteChoice]:
        """Return the answers of choices that have ended. If the engine sent events, this takes 20
        ms for 1000 tokens, so use a worker thread for long answers.

        Raises EngineStreamError if the engine has reported an error. Raises CannotShare if the
        stream does not have vLLM's form. If some choices are complete in spite of an error, these
        choices are returned, and the next call of `split` raises the error.
        """
        choices: list[CompleteChoice] = []
        try:
            for choice in ended:
                choices.append(self._complete(choice))
        except CannotShare as error:
            self._failure = error
        except _MALFORMED as error:
            self._failure = _malformed(error)
        if self._failure is not None and not choices:
            raise self._failure
        return choices

    def _new_capture(self, prompt_ids: IdArray | None) -> CallCapture:
        capture = self._unused.for_another_answer()
        prompt_ids = prompt_ids if self._prompt_ids is None else self._prompt_ids
        if prompt_ids is not None:
            capture.use_prompt_ids(prompt_ids)
        return capture

    def _complete(self, choice: EndedChoice) -> CompleteChoice:
        if isinstance(choice, SentChoice):
            capture = self._new_capture(None)
            answer = capture.complete_answer(choice.tokens, choice.answer)
            return CompleteChoice(choice.index, answer, capture)
        capture = self._new_capture(choice.prompt_ids)
        chunks = choice.chunks()
        if self._whole_form is not None:
            answer = self._whole_answer(capture, chunks, self._whole_form)
        else:
            answer = self._stream(capture, chunks)
        return CompleteChoice(choice.index, answer, capture)

    def _whole_answer(self, capture: CallCapture, chunks: list[Json], form: WholeForm) -> bytes:
        if any(has_reasoning(chunk["choices"][0].get("delta") or {}) for chunk in chunks):
            self._forms.parses_reasoning = True
            raise CannotShare(_PARSES_REASONING)
        return capture.whole(whole_answer(self._path, chunks, usage_of(chunks), form))

    def _stream(self, capture: CallCapture, chunks: list[Json]) -> bytes:
        assert self._usage_form is not None, "the form is known, or the call is not shared"
        usage = usage_of(chunks)
        last = usage_chunk(chunks[0], usage, self._usage_form)
        if not self._shows_usage_so_far:
            for chunk in chunks:
                del chunk["usage"]
        return capture.stream([*chunks, last])


def _malformed(error: Exception) -> CannotShare:
    return CannotShare(f"the engine's stream is malformed: {error}")
