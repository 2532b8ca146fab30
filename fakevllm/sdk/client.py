"""The client of a swarm server, for threads. `async_client.py` is its twin for an event loop; what
both say stands in `control.py` and `episodes.py`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator
from typing import Any, Self, TypeVar

from fakevllm.sdk import batch_calls, engine_calls, episode_calls
from fakevllm.sdk.access import EpisodeAccess
from fakevllm.sdk.callbacks import Watch, tell_progress
from fakevllm.sdk.episode import Episode
from fakevllm.sdk.executors import start_engines
from fakevllm.sdk.http_driver import Driver, access_of
from fakevllm.sdk.open_claims import OpenClaims
from fakevllm.sdk.protocol import Talk
from fakevllm.sdk.server_start import start_server
from fakevllm.sdk.types import ClientClosed, ServerUnreachable, SwarmError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.pool import EpisodeStatus, PoolInformation, ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

log = logging.getLogger("fakevllm.sdk")
T = TypeVar("T")


class SwarmClient:
    """Any number of threads may use one at once.

        client = SwarmClient("http://localhost:10086")
        client.auto_sync_train_config_and_start_engine(TrainJob(batch_size=8, num_repeat=4))
        with client.episode(task) as episode:
            answer = episode.openai().chat.completions.create(...)
            episode.end(reward=score(answer))

    Everything that asks the server raises ServerUnreachable where nobody answers, and SwarmError
    with the server's words where it refuses.
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
        """A server that asks for keys is shown `api_key`, or $FAKEVLLM_SWARM_KEY, or the
        credentials in the URL. `agentjet_job` has its place in AgentJet's signature, and nothing
        reads it: the server knows its job."""
        if verbose:
            tell_progress()
        if auto_start_swarm_server:
            start_server(server_url)
        self.server_url = server_url.rstrip("/")
        self.client_uuid = new_id()
        self._driver = Driver(self.server_url, api_key)
        self._watch: Watch | None = None
        self.open_claims = OpenClaims(self._driver, self.client_uuid)
        self._give_up = weakref.finalize(self, self.open_claims.give_up)  # also as the script ends
        self._was_on = False
        """Whether it has seen the engine run."""

    def close(self) -> None:
        self._give_up()
        if self._watch is not None:
            self._watch.stop()
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, talk: Talk[T]) -> T:
        return self._driver.run(talk)

    # --- the engine

    def status(self) -> EngineStatusReply:
        return self._run(engine_calls.status())

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """The state's name and all that was told with it; ENGINE.CANNOT_CONNECT where nobody
        answers."""
        try:
            known = self.status()
        except ServerUnreachable:
            return engine_calls.CANNOT_CONNECT, {}
        return known.engine_status, known.model_dump(mode="json")

    def get_global_step(self) -> int:
        """The step being collected; 0 where nobody answers."""
        return int(self.get_engine_status()[1].get("global_step") or 0)

    def sync_train_config(self, job: TrainJob) -> None:
        self._run(engine_calls.sync_job(job))

    def get_train_config(self) -> TrainJob | None:
        """The job the server has; None while it has none, or one that this client cannot read."""
        return self._run(engine_calls.train_config())

    def start_engine(self, timeout_s: float | None = None) -> None:
        """Returns once it answers; a large one takes minutes."""
        self._run(engine_calls.start(timeout_s))
        self._was_on = True

    def stop_engine(self) -> None:
        """Returns once it is off. It stops for everybody."""
        self._run(engine_calls.stop())

    def auto_sync_train_config_and_start_engine(
        self, job: TrainJob, force_restart: bool = False, timeout_s: float | None = None
    ) -> None:
        """An engine with this job. One that runs already stays, with its own job; what differs is
        logged."""
        self._run(engine_calls.ensure_running(job, force_restart, timeout_s))
        self._was_on = True

    async_and_start_multi_engine = staticmethod(start_engines)
    """AgentJet's name for it."""

    # --- episodes

    def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> tuple[str, EpisodeAccess]:
        """Waits for a free episode as long as it takes. One that is idle for longer than
        `discard_episode_timeout` seconds, with no call running, is given to the next who asks.
        Raises SwarmServerOfflineError where the engine is off and this client has seen it run."""
        talk = episode_calls.begin(
            self.client_uuid, episode_type, discard_episode_timeout, throttle_policy, self._was_on
        )
        claim = self._run(talk)
        self._was_on = True
        return claim.episode_uuid, access_of(self.server_url, claim)

    def end_episode(
        self,
        task: Task,
        episode_uuid: str,
        workflow_output: WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        """Returns once the server has it on disk; then it is trained once, whatever dies. Raises
        EpisodeLost where the claim is no longer this client's, ValueError for a reward that is not
        one finite number."""
        self._run(
            episode_calls.end(
                self.client_uuid, task, episode_uuid, workflow_output, declare_client_active
            )
        )

    def abort_episode(self, episode_uuid: str, declare_client_active: bool = True) -> None:
        """Nothing of it is trained. Never raises: the server gives up by itself what nobody
        ends."""
        try:
            self._run(episode_calls.abort(self.client_uuid, episode_uuid, declare_client_active))
        except ClientClosed:
            pass  # which has given its episodes up
        except SwarmError as error:
            log.warning("episode %s was not aborted: %s", episode_uuid, error)

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether it is worth going on with; False also where nobody answers."""
        try:
            return self._run(episode_calls.can_continue(self.client_uuid, episode_uuid))
        except SwarmError:
            return False

    def renew_episode(self, episode_uuid: str) -> None:
        """A sign of life between calls. Raises EpisodeLost."""
        self._run(episode_calls.renew(self.client_uuid, episode_uuid))

    @contextlib.contextmanager
    def episode(
        self,
        task: Task,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> Generator[Episode]:
        """An episode that is aborted where its block raises, or leaves without `end`, or where the
        script ends while it runs."""
        policy = episode_calls.of_task(throttle_policy, task)
        uuid, access = self.open_claims.begin(
            lambda: self.begin_episode(discard_episode_timeout, episode_type, policy)
        )
        episode = Episode(task, access, lambda output: self.end_episode(task, uuid, output))
        try:
            yield episode
        finally:
            if not episode.is_ended:
                self.abort_episode(uuid)
            self.open_claims.let_go(uuid)

    # --- the batch that is being collected

    def get_rollout_stat(self) -> PoolInformation:
        """All at their defaults where nobody answers."""
        try:
            return self._run(batch_calls.information())
        except SwarmError:
            return PoolInformation()

    def print_rollout_stat(self) -> None:
        from fakevllm.sdk.callbacks import show_pool

        show_pool(self.get_rollout_stat())

    def get_episode_buffer(self) -> list[EpisodeStatus]:
        """The live episodes this client may see; none where nobody answers."""
        try:
            return self._run(batch_calls.episode_buffer())
        except SwarmError:
            return []

    def agree_sync_weight(self) -> bool:
        """For jobs that collect until clients agree: asks for the step, and waits until it begins.
        False where its agreement was not taken, as the engine does not collect or another client's
        step came first, and where the engine goes off. Raises SwarmError where it is refused for
        ten minutes, as of a client that has ended nothing since the last step."""
        return self._run(batch_calls.agree(self.client_uuid))

    def server_experiment_dir(self) -> str:
        """Where the server keeps this run."""
        return self._run(batch_calls.experiment_dir())

    def add_entering_weight_sync_callback(self, callback: Callable[[], None]) -> None:
        """Called, in a thread of its own, once for each weight sync that begins."""
        if self._watch is None:
            self._watch = Watch(self.status)
            self._watch.start()
        self._watch.callbacks.append(callback)
