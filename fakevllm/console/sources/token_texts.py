"""The texts of token ids, which the running engine of the server decodes. The methods block the
calling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from fakevllm.tokens.detokenizer import TextsUnavailable, TokenTexts, texts_from_engine

MAX_AGE_S = 60.0
"""Seconds for which texts are kept. The answers of one group share most of their tokens. Later, the
engine may have another model."""
MAX_WAIT_S = 10.0
"""Maximum seconds for the texts of one page, because a browser waits for it. Texts that have not
arrived by then are not shown."""


class EngineTokenTexts:
    """The texts of token ids of one server, which all pages share."""

    def __init__(
        self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._texts: dict[int, str] = {}
        self._run_id: str | None = None
        """The training run to whose model the kept texts belong."""
        self._expires_at = 0.0

    def texts(self, ids: Collection[int], run_id: str | None) -> tuple[TokenTexts, str]:
        """Return the texts of token ids, and a sentence that says why texts are missing. The
        sentence is empty if all texts were found. `run_id` is the training run of the engine."""
        begin = self._clock()
        with self._lock:
            if begin > self._expires_at or run_id != self._run_id:
                self._texts, self._expires_at = {}, begin + MAX_AGE_S
                self._run_id = run_id
            known = self._texts
        missing = {id for id in ids if id not in known}
        if not missing:
            return known, ""
        try:
            found = texts_from_engine(self._url, self._key, missing, MAX_WAIT_S)
        except TextsUnavailable:  # translates: its message is about an option of a command
            return known, f"Texts are missing: no engine at {self._url} returned them."
        known.update(found)
        is_slow = len(found) < len(missing)
        return known, f"Texts are missing: the engine at {self._url} is slow." if is_slow else ""
