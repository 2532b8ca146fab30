"""One claimed episode, as an agent uses it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fakevllm.sdk import types
from fakevllm.sdk.access import EpisodeAccess
from fakevllm_adapters.protocol.swarm import Task, WorkflowOutput

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


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
    """A claimed episode for threads. Call `end` once; an episode without an end is aborted when its
    block is left."""

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
        """End the episode, and return once the server has the output on disk.

        Raises EpisodeLost, and ValueError for an output that cannot be trained.
        """
        self.end_with(_output(reward, is_success, metadata, log_metrics))

    def end_with(self, output: WorkflowOutput) -> None:
        """End the episode with a complete WorkflowOutput; otherwise like `end`."""
        self._send(output)
        self.is_ended = True


class AsyncEpisode(_ClaimedEpisode):
    """A claimed episode for an event loop; otherwise like `Episode`."""

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
        """End the episode, and return once the server has the output on disk.

        Raises EpisodeLost, and ValueError for an output that cannot be trained.
        """
        await self.end_with(_output(reward, is_success, metadata, log_metrics))

    async def end_with(self, output: WorkflowOutput) -> None:
        """End the episode with a complete WorkflowOutput; otherwise like `end`."""
        await self._send(output)
        self.is_ended = True


def _output(
    reward: float,
    is_success: bool | None,
    metadata: dict[str, Any] | None,
    log_metrics: dict[str, float | list[float]] | None,
) -> WorkflowOutput:
    """Return the output. Raises ValueError in one line."""
    return types.WorkflowOutput(
        reward=reward,
        is_success=is_success,
        metadata=metadata or {},
        log_metrics=log_metrics or {},
    )
