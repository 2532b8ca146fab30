"""The blocking client of a swarm server. Several threads may use it at the same time. The module
`async_client` has the client with async methods, for use in an event loop.

Both clients send the requests that `engine_control` and `episode_calls` define.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator
from typing import Any, Self, TypeVar

from fakevllm.sdk import engine_control, episode_calls
from fakevllm.sdk.console import log_to_stderr, print_pool
from fakevllm.sdk.episode import Episode, EpisodeAccess, OpenClaims, episode_access
from fakevllm.sdk.http_driver import HttpDriver
from fakevllm.sdk.multi_server import start_engines
from fakevllm.sdk.protocol import ServerCall
from fakevllm.sdk.server_start import start_server
from fakevllm.sdk.types import ClientClosed, ServerUnreachable, SwarmError
from fakevllm.sdk.weight_sync_callbacks import SyncWatcher
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import EpisodeStatus, PoolInformation, ThrottlePolicy
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

log = logging.getLogger("fakevllm.sdk")
T = TypeVar("T")


class SwarmClient:
    """The client of a swarm server. Any number of threads may share one client.

        client = SwarmClient("http://localhost:10086")
        client.auto_sync_train_config_and_start_engine(TrainJob(batch_size=8, num_repeat=4))
        with client.episode(task) as episode:
            answer = episode.openai().chat.completions.create(...)
            episode.end(reward=score(answer))

    Each method that contacts the server raises ServerUnreachable if no server answers. It raises
    SwarmError with the server's message if the server refuses the request. If a method does not
    follow these rules, its docstring says so.
    """

    def __init__(
        self,
        server_url: str,
        verbose: bool = True,
        agentjet_job: TrainJob | None = None,
        auto_start_swarm_server: bool = False,
        *,
        api_key: str | None = None,
    ) -> None:
        """Create a client of the server at `server_url`.

        `api_key` is the API key for the server. If `api_key` is None, the value of the environment
        variable FAKEVLLM_SWARM_KEY is used. If this variable is not set either, the credentials in
        the URL are used. If `verbose` is True, the client prints log lines to stderr. If
        `auto_start_swarm_server` is True and no server answers at `server_url`, the client starts a
        server on this machine.

        `agentjet_job` has no effect, because the server knows its job. The argument exists because
        the client of AgentJet has it.
        """
        if verbose:
            log_to_stderr()
        if auto_start_swarm_server:
            start_server(server_url)
        self.server_url = server_url.rstrip("/")
        self.client_uuid = new_id()
        self._driver = HttpDriver(self.server_url, api_key)
        self._sync_watcher: SyncWatcher | None = None
        self.open_claims = OpenClaims(self._driver, self.client_uuid)
        # The finalizer also runs when the script ends.
        self._abort_open_claims = weakref.finalize(self, self.open_claims.abort_all)
        self._has_seen_engine = False
        """Whether this client has seen the engine running at some time."""

    def close(self) -> None:
        self._abort_open_claims()
        if self._sync_watcher is not None:
            self._sync_watcher.stop()
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: ServerCall[T]) -> T:
        return self._driver.run(call)

    # --- the engine

    def status(self) -> EngineStatusReply:
        return self._run(engine_control.status())

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """Return (name of the engine's state, the server's whole status as a dict).

        If no server answers, the name is "ENGINE.CANNOT_CONNECT" and the dict is empty.
        """
        try:
            reply = self.status()
        except ServerUnreachable:
            return engine_control.CANNOT_CONNECT, {}
        return reply.engine_status, reply.model_dump(mode="json")

    def get_global_step(self) -> int:
        """Return the number of the training step whose batch is being collected. Return 0 if no
        server answers."""
        return int(self.get_engine_status()[1].get("global_step") or 0)

    def sync_train_config(self, job: TrainJob) -> None:
        self._run(engine_control.sync_job(job))

    def get_train_config(self) -> TrainJob | None:
        """Return the server's training job. Return None if the server has no job, or if this client
        cannot parse the job."""
        return self._run(engine_control.train_config())

    def start_engine(self, timeout_s: float | None = None) -> None:
        """Start the engine, and return once the engine serves requests. A large model takes
        minutes."""
        self._run(engine_control.start(timeout_s))
        self._has_seen_engine = True

    def stop_engine(self) -> None:
        """Stop the engine for all clients, and return once the engine is off."""
        self._run(engine_control.stop())

    def auto_sync_train_config_and_start_engine(
        self, job: TrainJob, force_restart: bool = False, timeout_s: float | None = None
    ) -> None:
        """Start the engine with this job, unless the engine is already running.

        Without `force_restart`, an engine that is already running keeps its own job, and the
        differences between its job and this job are logged. With `force_restart`, a running engine
        is stopped first, and then started with this job. `timeout_s` is the maximum number of
        seconds for the start. If `timeout_s` is None, there is no limit.
        """
        self._run(engine_control.ensure_running(job, force_restart, timeout_s))
        self._has_seen_engine = True

    async_and_start_multi_engine = staticmethod(start_engines)
    """AgentJet's name for `start_engines`."""

    # --- episodes

    def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> tuple[str, EpisodeAccess]:
        """Claim an episode: take one of the server's free slots for a run of the agent. Wait
        without a time limit until the server grants the claim. Return a pair: the episode's uuid,
        and an EpisodeAccess with its base URL and API key.

        If an episode has no running LLM call for more than `discard_episode_timeout` seconds, the
        server takes the episode back. Raises SwarmServerOfflineError if the engine is off now and
        this client has seen it running.
        """
        call = episode_calls.begin(
            self.client_uuid,
            episode_type,
            discard_episode_timeout,
            throttle_policy,
            self._has_seen_engine,
        )
        claim = self._run(call)
        self._has_seen_engine = True
        return claim.episode_uuid, episode_access(self.server_url, claim)

    def end_episode(
        self,
        task: Task,
        episode_uuid: str,
        workflow_output: WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        """End the episode, and return after the server has stored the output on disk.

        After that, the server trains the episode exactly once, or drops the episode and logs the
        reason. This holds even if processes crash. Raises EpisodeLost if the episode is no longer
        claimed by this client. Raises ValueError for an output that the server would refuse, such
        as an infinite reward.
        """
        self._run(
            episode_calls.end(
                self.client_uuid, task, episode_uuid, workflow_output, declare_client_active
            )
        )

    def abort_episode(self, episode_uuid: str, declare_client_active: bool = True) -> None:
        """Abort the episode, so that it is not trained.

        This method raises no SwarmError. If the abort does not reach the server, the server takes
        the episode back after the idle limit.
        """
        try:
            self._run(episode_calls.abort(self.client_uuid, episode_uuid, declare_client_active))
        except ClientClosed:
            pass  # closing the client has aborted its episodes
        except SwarmError as error:
            log.warning("episode %s was not aborted: %s", episode_uuid, error)

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Return True if the episode is still claimed by this client. Return False otherwise, or if
        the request fails."""
        try:
            return self._run(episode_calls.can_continue(self.client_uuid, episode_uuid))
        except SwarmError:
            return False

    def renew_episode(self, episode_uuid: str) -> None:
        """Ask the server to count the episode's idle time from 0 again. An agent calls this method
        if it makes no LLM call for a long time. Without this call, the server would take the
        episode back. Raises EpisodeLost if the episode is no longer claimed by this client."""
        self._run(episode_calls.renew(self.client_uuid, episode_uuid))

    @contextlib.contextmanager
    def episode(
        self,
        task: Task,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> Generator[Episode]:
        """Claim an episode, and yield it to a `with` block.

        The episode is aborted, and not trained, in three cases. The block raises, the block ends
        without a call of `Episode.end`, or the script ends while the block runs.

        When the client is closed, it aborts the episodes of all running blocks. If a block raises
        an error after that, ClientClosed is raised in place of this error.
        """
        policy = episode_calls.with_task_id(throttle_policy, task)
        uuid, access = self.open_claims.open(
            lambda: self.begin_episode(discard_episode_timeout, episode_type, policy)
        )
        episode = Episode(task, access, lambda output: self.end_episode(task, uuid, output))
        try:
            yield episode
        except Exception as error:
            if self.open_claims.is_closed:
                raise ClientClosed("The client is closed.") from error
            raise
        finally:
            if not episode.is_ended:
                self.abort_episode(uuid)
            self.open_claims.release(uuid)

    # --- the batch that is being collected

    def get_rollout_stat(self) -> PoolInformation:
        """Return the progress of the batch that the server is collecting for the next training
        step. If the request fails, return a PoolInformation with default values."""
        try:
            return self._run(engine_control.pool_information())
        except SwarmError:
            return PoolInformation()

    def print_rollout_stat(self) -> None:
        print_pool(self.get_rollout_stat())

    def get_episode_buffer(self) -> list[EpisodeStatus]:
        """Return the running episodes that this client's API key may see, or [] if the request to
        the server fails."""
        try:
            return self._run(engine_control.episode_buffer())
        except SwarmError:
            return []

    def agree_sync_weight(self) -> bool:
        """Agree to the next training step, and wait until the step begins.

        Use this method if the job lets the clients decide when a batch is complete. Return True if
        the server accepted the agreement and the batch has ended, usually by a training step.
        Return False in three cases. The engine does not collect a batch, a step began without this
        client's agreement, or the engine was stopped while this method waited. Raises SwarmError if
        the server refuses the agreement for ten minutes. For example, the server refuses if this
        client has ended no episode since the last step.
        """
        return self._run(engine_control.agree(self.client_uuid))

    def server_experiment_dir(self) -> str:
        """Return the path of the server's folder for this run."""
        return self._run(engine_control.experiment_dir())

    def add_entering_weight_sync_callback(self, callback: Callable[[], None]) -> None:
        """Register a function that is called once at the beginning of each weight sync (a training
        step and the publication of its weights). A background thread calls the function."""
        if self._sync_watcher is None:
            self._sync_watcher = SyncWatcher(self.status)
            self._sync_watcher.start()
        self._sync_watcher.callbacks.append(callback)
