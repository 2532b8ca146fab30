"""The objects for episodes that a client has claimed. An Episode or AsyncEpisode has the methods
that an agent uses. OpenClaims lists the claims that a client must abort when it closes."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fakevllm.sdk import episode_calls, types
from fakevllm.sdk.http_driver import HttpDriver, bare_url, ssl_context
from fakevllm.sdk.types import ClientClosed, SwarmError
from fakevllm_adapters.protocol.swarm import Task, WorkflowOutput

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

ABORT_LIMIT_S = 2.0
"""Maximum number of seconds for aborting all claims. A script that is interrupted with Ctrl-C
should end at once, and claims that were not aborted expire at the server."""


@dataclass(frozen=True, slots=True)
class EpisodeAccess:
    """Base URL and API key of one episode, for any OpenAI client."""

    base_url: str
    """URL that ends in /v1."""
    api_key: str
    episode_uuid: str
    model: str = "reserved_field"
    """A placeholder: the server serves one model, and ignores the name in a request."""

    def openai(self) -> OpenAI:
        """Return an OpenAI client for this episode. Close the client, or use it in a `with` block.
        Otherwise, the client closes its sockets when it is garbage-collected."""
        from openai import OpenAI

        http = _self_closing_client()(verify=ssl_context())
        return OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    def async_openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(verify=ssl_context())
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    as_raw_openai_sdk_client = async_openai
    """AgentJet's name for `async_openai`."""


def episode_access(url: str, claim: episode_calls.Claim) -> EpisodeAccess:
    """Return the base URL and the API key of a claimed episode. The base URL begins with `url`, the
    server's URL that this client uses.

    Only the path is taken from the base URL that the server reports. The rest may be wrong for this
    client, for example if the client reaches the server through a tunnel.
    """
    return EpisodeAccess(bare_url(url) + claim.path, claim.api_key, claim.episode_uuid)


class _ClaimedEpisode:
    def __init__(self, task: Task, access: EpisodeAccess) -> None:
        self.task = task
        self.access = access
        self.is_ended = False

    @property
    def uuid(self) -> str:
        return self.access.episode_uuid

    @property
    def base_url(self) -> str:
        return self.access.base_url

    @property
    def api_key(self) -> str:
        return self.access.api_key


class Episode(_ClaimedEpisode):
    """A claimed episode whose methods block the calling thread. Call `end` once. If the `with`
    block of the episode ends before `end` was called, the episode is aborted and not trained."""

    def __init__(
        self, task: Task, access: EpisodeAccess, send: Callable[[WorkflowOutput], None]
    ) -> None:
        super().__init__(task, access)
        self._send = send

    def openai(self) -> OpenAI:
        return self.access.openai()

    def end(
        self,
        reward: float,
        is_success: bool | None = None,
        metadata: dict[str, Any] | None = None,
        log_metrics: dict[str, float | list[float]] | None = None,
    ) -> None:
        """End the episode, and return after the server has stored the output on disk.

        Raises EpisodeLost if this client no longer has the claim of the episode. Raises ValueError
        for values that cannot be trained, such as an infinite reward.
        """
        self.end_with(_output(reward, is_success, metadata, log_metrics))

    def end_with(self, output: WorkflowOutput) -> None:
        """End the episode with this output. `end` does the same, but takes the fields of the output
        as separate arguments."""
        self._send(output)
        self.is_ended = True


class AsyncEpisode(_ClaimedEpisode):
    """A claimed episode with async methods. It is used like `Episode`, but the methods `end` and
    `end_with` are coroutines, and `openai` returns an AsyncOpenAI."""

    def __init__(
        self, task: Task, access: EpisodeAccess, send: Callable[[WorkflowOutput], Awaitable[None]]
    ) -> None:
        super().__init__(task, access)
        self._send = send

    def openai(self) -> AsyncOpenAI:
        return self.access.async_openai()

    async def end(
        self,
        reward: float,
        is_success: bool | None = None,
        metadata: dict[str, Any] | None = None,
        log_metrics: dict[str, float | list[float]] | None = None,
    ) -> None:
        """End the episode, and return after the server has stored the output on disk.

        Raises EpisodeLost if this client no longer has the claim of the episode. Raises ValueError
        for values that cannot be trained, such as an infinite reward.
        """
        await self.end_with(_output(reward, is_success, metadata, log_metrics))

    async def end_with(self, output: WorkflowOutput) -> None:
        """End the episode with this output. `end` does the same, but takes the fields of the output
        as separate arguments."""
        await self._send(output)
        self.is_ended = True


class OpenClaims:
    """The claims of all `with client.episode(…)` blocks that are running now. The episodes of these
    claims are aborted when the client is closed or the script ends.

    Claims that `begin_episode` made outside such a block are not included, because another process
    may continue their episodes.
    """

    def __init__(self, driver: HttpDriver, client_uuid: str) -> None:
        self._driver = driver
        self._client_uuid = client_uuid
        self._uuids: set[str] = set()
        self._num_pending = 0
        """Number of claims that were requested and are not granted yet."""
        self.is_closed = False
        """Whether `abort_all` has been called."""
        self._changed = threading.Condition()
        self._pid = os.getpid()

    def open(self, begin: Callable[[], tuple[str, EpisodeAccess]]) -> tuple[str, EpisodeAccess]:
        """Claim an episode with the function `begin`, and count the claim as open until `release`
        is called. Return a pair: the episode's uuid, and an EpisodeAccess with its base URL and API
        key.

        Raises ClientClosed if `abort_all` has been called.
        """
        with self._changed:
            if self.is_closed:
                raise ClientClosed("The client is closed.")
            self._num_pending += 1
        try:
            claim = begin()
            self._uuids.add(claim[0])
            return claim
        finally:
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()

    def release(self, uuid: str) -> None:
        self._uuids.discard(uuid)

    def abort_all(self) -> None:
        """Abort the episodes of all open claims, and refuse new claims. This method raises no
        SwarmError.

        Without these aborts, the server would wait for the episodes until the claims expire. A user
        who restarts the script would have to wait until then, too.
        """
        if os.getpid() != self._pid:  # the end of a forked process is not its parent's
            return
        limit = time.monotonic() + ABORT_LIMIT_S
        with self._changed:
            self.is_closed = True
            self._driver.end_waits()
            self._changed.wait_for(lambda: not self._num_pending, ABORT_LIMIT_S / 2)
        for uuid in tuple(self._uuids):
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return
            try:
                self._driver.run(episode_calls.abort_once(self._client_uuid, uuid, left_s))
            except SwarmError:  # the script ends: nobody could handle the error
                return


def _output(
    reward: float,
    is_success: bool | None,
    metadata: dict[str, Any] | None,
    log_metrics: dict[str, float | list[float]] | None,
) -> WorkflowOutput:
    """Return the values as a WorkflowOutput. If a value is invalid, raise ValueError with a
    one-line message."""
    return types.WorkflowOutput(
        reward=reward,
        is_success=is_success,
        metadata=metadata or {},
        log_metrics=log_metrics or {},
    )


@functools.cache
def _self_closing_client() -> Any:
    """Return a subclass of openai's default HTTP client. An object of this class closes itself when
    it is garbage-collected.

    The class is created on first use, because importing openai takes time.
    """
    from openai import DefaultHttpxClient

    class SelfClosingClient(DefaultHttpxClient):
        def __del__(self) -> None:
            if not self.is_closed:
                self.close()

    return SelfClosingClient
