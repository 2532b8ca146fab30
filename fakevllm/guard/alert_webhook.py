"""Send alarms as JSON to the address in `alerts.url`.

The queue in front of the sending task has a bound, each attempt has a timeout, and failed attempts
are repeated with growing pauses. An alert that is lost is counted, and the log has one line. Nobody
waits for this task, so an address that hangs delays nothing. The body has no text of an app. The
log names only the host, because the path of such an address is often secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from tenacity.wait import wait_base

from fakevllm.runtime.plurals import counted

log = logging.getLogger("fakevllm.guard.alert_webhook")

SECRET_VARIABLE = "FAKEVLLM_ALERTS_SECRET"
"""Environment variable with the secret that signs alerts."""
SIGNATURE_HEADER = "X-Fakevllm-Signature"
"""Header with `sha256=` and the HMAC of the body in hex, as in GitHub's `X-Hub-Signature-256`."""
MAX_QUEUED = 64
"""Maximum number of alerts that wait to be sent. There is at most one alert for each episode of
trouble, so more of them mean that the address has been away for a long time."""
TIMEOUT_S = 10.0
"""Timeout of one attempt, in seconds."""
NUM_ATTEMPTS = 8
"""Number of attempts before an alert is lost. With the pauses, they take about a minute and two at
most. If the address hangs, they take up to three and a half minutes."""
MAX_PAUSE_S = 60.0
"""Upper bound of the pause between two attempts. Pauses are random, and their bound doubles."""
_PASSING_STATUSES = (408, 429)
"""Statuses below 500 with which a server says that a later attempt may succeed."""


class _Refused(Exception):
    """An answer with another status than 2xx."""

    def __init__(self, status: int) -> None:
        self.status = status
        text = f"it answers with status {status}"
        if 300 <= status < 400:
            text = f"it redirects (status {status}), and alerts are sent to no other address"
        super().__init__(text)


class AlertWebhook:
    """The sender of alerts. `run` is its task. Call `close` after the task has ended."""

    def __init__(
        self,
        url: str,
        secret: str | None,
        *,
        max_queued: int = MAX_QUEUED,
        timeout_s: float = TIMEOUT_S,
        pause: wait_base = wait_random_exponential(max=MAX_PAUSE_S),
    ) -> None:
        """Create the sender. If `secret` is None, alerts have no signature."""
        self._url = url
        self._host = urlsplit(url).netloc
        self._secret = secret
        self._timeout_s = timeout_s
        self._pause = pause
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(max_queued)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))
        self._num_sent = self._num_failed = self._num_dropped = 0
        self._is_sending = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of alerts by what became of them."""
        return {"sent": self._num_sent, "failed": self._num_failed, "dropped": self._num_dropped}

    def put(self, alert: Mapping[str, Any]) -> None:
        """Queue an alert. Drop it if the queue is full."""
        try:
            self._queue.put_nowait(json.dumps(alert).encode())
        except asyncio.QueueFull:
            self._num_dropped += 1
            self._report_loss("too many alerts wait")

    async def run(self) -> None:
        """Send the queued alerts one after the other, until this task is cancelled."""
        while True:
            body = await self._queue.get()
            self._is_sending = True
            try:
                await self._send(body)
                self._num_sent += 1
            except Exception as error:  # isolates: later alerts are sent all the same
                self._num_failed += 1
                self._report_loss(self._cause(error))
            self._is_sending = False

    async def close(self) -> None:
        """Close the connections. Alerts that were not sent are lost, and are counted."""
        num_lost = self._queue.qsize() + self._is_sending
        self._num_dropped += num_lost
        if num_lost:
            self._report_loss("the proxy stops", num_lost)
        await self._http.close()

    async def _send(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self._secret is not None:
            headers[SIGNATURE_HEADER] = signature(self._secret, body)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(NUM_ATTEMPTS),
            wait=self._pause,
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                # A redirect to another host would get the alert, and its signature.
                async with self._http.post(
                    self._url, data=body, headers=headers, allow_redirects=False
                ) as response:
                    if not 200 <= response.status < 300:
                        raise _Refused(response.status)

    def _cause(self, error: Exception) -> str:
        match error:
            case TimeoutError():
                return f"it does not answer within {self._timeout_s:g} s"
            case _Refused():
                return str(error)
            case _:  # the text of another error may contain the address
                return type(error).__name__

    def _report_loss(self, cause: str, num: int = 1) -> None:
        log.warning(
            "%s to %s could not be sent (%s): the log and `fakevllm status` have the alarms; see "
            "`[alerts] url`",
            counted(num, "alert"),
            self._host,
            cause,
        )


def signature(secret: str, body: bytes) -> str:
    """Return the value of SIGNATURE_HEADER for a body.

    >>> signature("secret", b"{}")[:15]
    'sha256=77325902'
    """
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def _is_transient(error: BaseException) -> bool:
    """Return True if a later attempt may succeed."""
    if isinstance(error, _Refused):
        return error.status >= 500 or error.status in _PASSING_STATUSES
    return isinstance(error, aiohttp.ClientError | TimeoutError | OSError)
