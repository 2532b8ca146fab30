"""A prompt without messages as a history: it continues an earlier one if it begins with that
prompt and the answer to it."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Any

from fakevllm.conversation.normal_form import KEY_BYTES, History, Said, start_of

NUM_ENDS = 256
"""Answers that a prompt is tried against: each costs a hash's end."""


class TextEnds:
    """How long the latest prompts were with their answers."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=NUM_ENDS)

    def history_of(self, prompt: str, scope: str) -> History:
        """One message for each earlier end, whether or not it is one of this prompt's, and a last
        one for the prompt."""
        history = History(start_of(scope))
        if not prompt:
            return history
        running, at = _begun(history.start), 0
        for length in sorted({one for one in self._lengths if one <= len(prompt)}):
            running.update(_bytes(prompt[at:length]))
            at = length
            key = running.digest()
            history.said.append(Said("end", key, key, (), False, False, ""))
        running.update(_bytes(prompt[at:]))
        key = running.digest()
        history.said.append(Said("user", key, key, (), True, False, prompt))
        return history

    def add(self, length: int) -> None:
        self._lengths.append(length)


class TextSoFar:
    """A prompt that waits for its answer: its hash, not its text."""

    def __init__(self, prompt: str, scope: str) -> None:
        self._running = _begun(start_of(scope))
        self._running.update(_bytes(prompt))
        self._length = len(prompt)

    def ended_by(self, answer: str) -> tuple[bytes, int] | None:
        """Key and length of both; None where there is no answer."""
        told = answer.rstrip()
        if not told:
            return None
        whole = self._running.copy()
        whole.update(_bytes(told))
        return whole.digest(), self._length + len(told)


def _begun(start: bytes) -> Any:
    return blake2b(b"text" + start, digest_size=KEY_BYTES)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
