"""vLLM as the rollout engine. Either the server starts vLLM as a child process on a Unix socket, or
the user starts vLLM and the server connects to it at `--rollout-url`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import shutil
from dataclasses import replace
from pathlib import Path

from fakevllm_runtime.engines import VLLM_BOOT_TIMEOUT_S
from fakevllm_server.backends.process.child_process import ChildProcess
from fakevllm_server.backends.vllm.adapters import Adapters, adapter_root
from fakevllm_server.backends.vllm.capability_checks import training_refusal
from fakevllm_server.backends.vllm.capability_probe import ServedModel, probe, write_report
from fakevllm_server.backends.vllm.command import (
    KNOWN_VERSIONS,
    Install,
    max_lora_rank,
    parse_flags,
    serve_command,
    serve_environment,
    transfer_engine_of,
)
from fakevllm_server.backends.vllm.control_client import NO_ROUTE, ControlClient
from fakevllm_server.backends.vllm.held_adapters import HeldAdapters
from fakevllm_server.backends.vllm.known_prompt import known_prompt_ids, known_prompt_reply
from fakevllm_server.backends.vllm.model_folder import (
    read_chat_template,
    read_default_sampling,
    read_num_layers,
)
from fakevllm_server.backends.vllm.remote_url import base_url, host_and_port
from fakevllm_server.backends.vllm.startup_errors import explain_startup_error
from fakevllm_server.backends.vllm.watchdog import wait_until_hung
from fakevllm_server.backends.vllm.weight_update import load_from_folder, receive
from fakevllm_server.types.backend import BackendError, BackendRefused, Endpoint
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.weight_transfer import ExportWeights, SendWeights, TransferTarget
from fakevllm_server.types.weight_versions import WeightGate

log = logging.getLogger("fakevllm.server")

NO_POLICIES = (
    "vLLM serves one set of full weights: it cannot hold another version beside it, so only the "
    "version that it serves can be sampled. It holds several as adapters if the server starts it "
    "with --engine-arg=--enable-lora for a job with lora_rank"
)
DRAIN_BOUND_S = 15.0
"""Maximum seconds that new weights wait for calls in progress. Longer calls continue with the new
weights."""
NUM_REPEATED_PROBES = 3
"""Number of further answers to the known prompt that an external vLLM must give. Each request has a
connection of its own. If a load balancer divides the requests among two engines at random, the
answers are those of one engine with a probability of 1/8."""
NUM_RESUME_REQUESTS = 16
"""Number of requests in each of these rounds. Of four vLLMs among which a load balancer divides
requests at random, 16 requests miss a given one with a probability of 1 %."""
NUM_RESUME_ROUNDS = 3
"""Maximum number of times that each engine behind an external vLLM's address is looked for, if one
of them is still paused."""
MAX_FAILED_PUBLISHES = 3
"""Number of failed publishes (attempts to load new weights) in a row after which an external vLLM
counts as unhealthy. The server then connects to this vLLM again and probes it again."""
CHILD_URL = "http://engine"


class VllmRollout:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process = ChildProcess("vLLM", spec.log_file)
        self._client: ControlClient | None = None
        self._socket: Path | None = None
        """Socket of the child process, or None for an external vLLM."""
        self._served: ServedModel | None = None
        """The model that vLLM serves, or None before the first launch."""
        self._adapters: Adapters | None = None
        """The adapters that vLLM holds; None if its own weights are replaced."""
        self._has_held_adapters = False
        """Whether this vLLM, or an earlier one with the same arguments, has held adapters."""
        self._held_adapters: HeldAdapters | None = None
        """The record of held adapters in the run directory; None if vLLM holds no adapters."""
        self._transfer_engine: str | None = None
        """Name of vLLM's weight transfer engine, or None if it loads weights from folders only."""
        self._known_prompt: list[int] | None = None
        """Token ids of the known prompt, or None before they were requested."""
        self._gate = WeightGate()
        self._closing: asyncio.Future[None] | None = None
        self._is_changing = False
        """Whether vLLM is paused, or about to be paused, for new weights."""
        self._is_asleep = False
        """Whether vLLM has freed its memory for a training step, or is about to."""
        self._num_failed = 0
        """Number of publishes in a row that failed after the pause."""

    async def launch(self) -> Endpoint:
        """Start vLLM, or connect to an external vLLM. Then probe vLLM's capabilities.

        Raise BackendRefused if the user must correct a setting. Raise BackendError if vLLM does not
        become ready for another reason.
        """
        await self.close()
        try:
            if self._spec.url is None:
                return await self._start()
            return await self._connect(self._spec.url)
        except BaseException:
            await self.close()
            raise

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights that vLLM serves. If vLLM serves LoRA adapters, it continues to
        answer during the replacement.

        Without adapters, vLLM is paused for the replacement. Before the pause, running calls have
        up to `DRAIN_BOUND_S` seconds to finish, or the seconds that the engine's spec sets. Raise
        BackendError if the weights cannot be replaced. The state after a failure depends on the
        cause:

        * If vLLM could not be paused but still works, vLLM continues with the old weights.
        * A child process that fails after the pause is ended, because its weights are unknown.
        * An external vLLM that fails after the pause stays paused. Its calls wait until a later
          publish of weights succeeds.
        """
        client = self._connected_client()
        if self._adapters is not None:
            await self._adapters.serve(folder, version)
            await self._record_held_adapters()
            return
        async with self._gate.change(version, self._drain_bound_s, lambda: self._pause(client)):
            try:
                await load_from_folder(client, folder, version)
            except BackendError as failure:
                raise await self._publish_failure(failure, folder) from None
            if self._spec.url is not None:
                await self._resume_all(client)
            self._new_weights_are_served()

    async def receive_weights(self, send: SendWeights, export: ExportWeights, version: int) -> None:
        """Replace the weights that vLLM serves by those that the trainer's process sends.

        vLLM is paused as in `load_weights`. If sending fails, vLLM stays paused and loads the
        weights from a folder. If this fails too, vLLM is ended, and BackendError is raised.
        """
        client = self._connected_client()

        async def transfer() -> None:
            await send(await self._transfer_target(client))

        async with self._gate.change(version, self._drain_bound_s, lambda: self._pause(client)):
            try:
                await receive(client, transfer, export, version)
            except BackendError as failure:
                raise await self._publish_failure(failure, Path()) from None
            self._new_weights_are_served()

    async def sleep(self) -> None:
        """Let vLLM free the memory of the GPU. Calls that arrive later wait until `wake_up`, or
        until new weights are served. Before, running calls have up to `DRAIN_BOUND_S` seconds to
        finish. Longer calls continue when vLLM serves again.

        Raise BackendError if vLLM does not fall asleep. vLLM is then ended, because it may still
        use the memory.
        """
        client = self._connected_client()
        self._is_asleep = True
        await self._gate.hold(DRAIN_BOUND_S)
        try:
            await client.sleep()
        except BackendError as failure:
            await self.close()
            raise BackendError(f"vLLM did not fall asleep and was ended: {failure}") from None

    async def wake_up(self) -> None:
        """If vLLM sleeps, let it serve again with the weights that it had before. Raise
        BackendError if vLLM does not wake up. vLLM is then ended. If new weights were only loaded
        in part, because the publish was cancelled, vLLM is ended without waking up."""
        if not self._is_asleep:
            return
        if self._is_changing:
            await self.close()
            return
        client = self._connected_client()
        try:
            await client.wake_up_weights()
            await client.wake_up_cache()
            await client.resume()
        except BackendError as failure:
            await self.close()
            raise BackendError(f"vLLM did not wake up and was ended: {failure}") from None
        self._is_asleep = False
        self._gate.release()

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        await self._policy_holder().load_policy(name, folder, version)

    async def unload_policy(self, name: str) -> None:
        await self._policy_holder().unload_policy(name)

    async def policies(self) -> dict[str, int]:
        return {} if self._adapters is None else dict(self._adapters.names.loaded)

    async def probe(self) -> ProbeReply | None:
        """Return the log-probabilities of the prompt KNOWN_PROMPT, which show which weights vLLM
        serves. Raise ActionFailed if vLLM does not report the log-probabilities.

        Return None in two cases:

        * The model folder does not name the number of layers. The accepted difference from the
          trainer's log-probabilities depends on this number.
        * vLLM serves LoRA adapters. vLLM may then run other requests during the probe. The engine
          of vLLM 0.27 dies if a request for prompt log-probabilities arrives while other requests
          run.
        """
        num_layers = read_num_layers(self._spec.model)
        if num_layers is None or self._adapters is not None:
            return None
        client, served = self._connected_client(), self._served
        assert served is not None, "the model is known while vLLM is connected"
        if self._known_prompt is None:
            self._known_prompt = await known_prompt_ids(client, served.name, served.max_model_len)
        ids = self._known_prompt
        reply = await known_prompt_reply(client, served.name, ids, num_layers)
        if self._spec.url is None:
            return reply
        again = [
            await known_prompt_reply(client, served.name, ids, num_layers)
            for _ in range(NUM_REPEATED_PROBES)
        ]
        return replace(reply, repeated=[each.log_probs for each in again])

    async def health(self) -> bool:
        if self._num_failed >= MAX_FAILED_PUBLISHES or self._client is None:
            return False
        if self._socket is not None and not self._process.is_running:
            return False
        return await self._client.is_healthy()

    async def lost(self) -> str:
        """Wait until vLLM has ended or hangs. End a child process that hangs. Return a message that
        describes the failure."""
        if self._client is None:
            return "vLLM is not running"
        hung = asyncio.ensure_future(self._wait_until_hung(self._client))
        watchers = {hung}
        if self._socket is not None:
            watchers.add(asyncio.ensure_future(self._process.lost()))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            if hung in done:
                await self.close()
            return done.pop().result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def close(self) -> None:
        """End the child process, or disconnect from an external vLLM.

        If this call is cancelled, the work continues in the background. The next call of `close`
        waits for this work.
        """
        if self._closing is None or self._closing.done():
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._gate.abandon()
        if self._client is not None:
            if self._is_changing and self._socket is None:
                await self._resume_external(self._client)
            await self._client.close()
            self._client = None
        self._is_changing, self._is_asleep, self._num_failed = False, False, 0
        await self._process.close()
        if self._adapters is not None:
            self._adapters = None
            await self._remove_adapter_files()
        if self._socket is not None:
            self._spec.remove_socket(self._socket)
            self._socket = None

    async def _start(self) -> Endpoint:
        spec, install = self._spec, find_install()
        if not install.is_known:
            low, high = (".".join(map(str, version)) for version in KNOWN_VERSIONS)
            log.warning(
                "vLLM %s is untested; tested versions are >=%s,<%s", install.version, low, high
            )
        template = read_chat_template(spec.model, parse_flags(spec.extra_args))
        self._transfer_engine = transfer_engine_of(spec, install)
        holds_adapters = max_lora_rank(spec) is not None
        if holds_adapters:
            await self._remove_adapter_files()
            arguments = serve_command(spec, install, Path(), template)  # each start has a socket
            self._held_adapters = record = HeldAdapters(spec, install.version, arguments)
            is_recorded = await asyncio.to_thread(record.is_recorded)
            self._has_held_adapters = self._has_held_adapters or is_recorded
        self._socket = spec.new_socket()
        await self._process.start(
            serve_command(spec, install, self._socket, template),
            serve_environment(
                spec.environment,
                install,
                holds_adapters=holds_adapters,
                transfer_engine=self._transfer_engine,
            ),
        )
        self._client = ControlClient(CHILD_URL, self._socket, {})
        try:
            await self._process.wait_until_ready(self.health, VLLM_BOOT_TIMEOUT_S)
        except BackendRefused:
            raise
        except BackendError as failure:
            cause = explain_startup_error(_read_from(spec.log_file, self._process.log_start))
            raise failure if cause is None else BackendError(f"{failure}: {cause}") from None
        return await self._probe(self._client, CHILD_URL, {})

    async def _connect(self, user_url: str) -> Endpoint:
        key = self._spec.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url, peer = base_url(user_url), host_and_port(user_url)
        self._client = client = ControlClient(url, None, headers)
        response = await client.get("/health")
        if not response.is_ok:
            raise BackendError(
                f"vLLM at {peer} cannot be reached ({response.detail}): "
                "start it, or correct --rollout-url"
            )
        if await client.is_paused():
            log.warning("vLLM at %s was paused; resuming it", peer)
            await client.resume()
        return await self._probe(client, url, headers)

    async def _probe(self, client: ControlClient, url: str, headers: dict[str, str]) -> Endpoint:
        flags = parse_flags(self._spec.extra_args)
        template = read_chat_template(self._spec.model, flags)
        model, results = await probe(client, self._spec.served_model_name, template)
        write_report(results, self._spec.run_dir)
        self._served, self._known_prompt = model, None
        self._gate = WeightGate()
        rank = max_lora_rank(self._spec)
        if rank is not None:
            self._adapters = Adapters(
                client,
                self._gate,
                self._spec.run_dir,
                model.name,
                rank,
                were_held=self._has_held_adapters,
                drain_bound_s=self._spec.drain_bound_s,
            )
        return Endpoint(
            self._socket,
            url,
            model.name,
            model.max_model_len,
            read_default_sampling(self._spec.model, flags),
            headers=headers,
            refusal=training_refusal(results),
            holds_policies=rank is not None,
            takes_adapters=rank is not None,
            gate=self._gate,
        )

    async def _record_held_adapters(self) -> None:
        if self._has_held_adapters or self._held_adapters is None:
            return
        self._has_held_adapters = True
        try:
            await asyncio.to_thread(self._held_adapters.record)
        except OSError as error:  # isolated: only a later server process reads the record
            log.warning("it is not recorded that vLLM holds adapters: %s", error)

    def _policy_holder(self) -> Adapters:
        if self._adapters is not None:
            return self._adapters
        if max_lora_rank(self._spec) is not None:
            raise BackendError("vLLM is not running")
        raise BackendRefused(NO_POLICIES)

    async def _remove_adapter_files(self) -> None:
        root = adapter_root(self._spec.run_dir)
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    async def _pause(self, client: ControlClient) -> None:
        """Pause vLLM. Raise BackendError if the pause request fails.

        vLLM may be paused even if the request failed. Therefore vLLM is resumed before the error is
        raised, if vLLM still has its old weights. A sleeping vLLM is paused already, and needs only
        the memory for its weights.
        """
        self._is_changing = True
        try:
            await (client.wake_up_weights() if self._is_asleep else client.pause())
        except BackendError as failure:
            # vLLM no longer has the old weights, or no memory for them: do not resume it.
            if self._num_failed or self._is_asleep:
                raise await self._pause_failure(failure) from None
            # vLLM may have paused although the request failed.
            response = await client.post("/resume")
            self._is_changing = False
            if not response.is_ok and response.status not in NO_ROUTE:
                raise await self._pause_failure(failure) from None
            raise type(failure)(
                f"{self._name} was not paused for new weights and keeps its old weights: {failure}"
            ) from None

    async def _pause_failure(self, failure: BackendError) -> BackendError:
        """Handle a failed pause, and return the error to raise. It is not known whether vLLM is
        paused. If vLLM is a child process, end it, so that the server starts vLLM again. If vLLM is
        external, mark it as unhealthy, so that the server connects again."""
        if self._spec.url is None:
            await self.close()
            return BackendError(
                f"vLLM could not be paused for new weights and was ended: {failure}"
            )
        self._is_changing, self._num_failed = True, MAX_FAILED_PUBLISHES
        self._warn_paused()
        return BackendError(f"{self._name} was not paused for new weights: {failure}")

    def _new_weights_are_served(self) -> None:
        self._is_changing, self._is_asleep, self._num_failed = False, False, 0

    @property
    def _drain_bound_s(self) -> float:
        """Maximum seconds that new weights wait for running calls. Before vLLM fell asleep, the
        calls have had their time, and the calls of a sleeping vLLM cannot end."""
        return 0.0 if self._is_asleep else self._spec.drain_bound_s or DRAIN_BOUND_S

    async def _transfer_target(self, client: ControlClient) -> TransferTarget:
        """Return the vLLM to which the trainer sends weights. Raise ActionFailed if vLLM does not
        say how many workers it has."""
        assert self._transfer_engine is not None, "vLLM was started for a weight transfer"
        assert self._socket is not None, "weights are sent only to a vLLM that the server starts"
        size = await client.world_size()
        return TransferTarget(str(self._socket), self._transfer_engine, size)

    async def _publish_failure(self, failure: BackendError, folder: Path) -> BackendError:
        """Handle a failure to load new weights, and return the error to raise. If vLLM is a child
        process, end it. If vLLM is external, count the failure. After MAX_FAILED_PUBLISHES failures
        in a row, an external vLLM counts as unhealthy."""
        if self._spec.url is None:
            await self.close()
            return BackendError(f"vLLM did not take new weights and was ended: {failure}")
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED_PUBLISHES:
            self._warn_paused()
        return BackendError(
            f"{self._name} did not take the weights in {folder}: {failure}. vLLM must see that "
            "folder under the same path: set --weights-dir to a folder that both programs see"
        )

    async def _resume_external(self, client: ControlClient) -> None:
        if not (await client.post("/resume")).is_ok:
            self._warn_paused()

    async def _resume_all(self, client: ControlClient) -> None:
        """Resume all engines at an external vLLM's address. If a load balancer has this address,
        the pause and the resume may have reached different engines. Calls of an engine that stays
        paused would wait for ever, and so would the probe that finds the load balancer. Each
        request has a connection of its own, so a load balancer divides the requests."""
        for _ in range(NUM_RESUME_ROUNDS):
            if not await _is_any_paused(client):
                return
            for _ in range(NUM_RESUME_REQUESTS):
                await client.post("/resume")
        if await _is_any_paused(client):
            self._warn_paused()

    def _warn_paused(self) -> None:
        log.warning(
            "%s may still be paused for all of its clients: resume it with curl -X POST %s/resume",
            self._name,
            base_url(self._spec.url or CHILD_URL),
        )

    @property
    def _name(self) -> str:
        return "vLLM" if self._spec.url is None else f"vLLM at {host_and_port(self._spec.url)}"

    async def _wait_until_hung(self, client: ControlClient) -> str:
        problem = await wait_until_hung(
            client,
            lambda: self._gate.num_running,
            lambda: self._is_changing or self._is_asleep,
        )
        return f"vLLM {problem}"

    def _connected_client(self) -> ControlClient:
        if self._client is None:
            raise BackendError("vLLM is not running")
        return self._client


async def _is_any_paused(client: ControlClient) -> bool:
    """Return True if one of several answers says that the engine is paused. All are requested, so
    that a load balancer goes on in turn."""
    return any([await client.is_paused() for _ in range(NUM_RESUME_REQUESTS)])


def _read_from(file: Path, position: int) -> str:
    """Return the text of a log file from the byte position `position` to the end."""
    with file.open("rb") as log_file:
        log_file.seek(position)
        return log_file.read().decode(errors="replace")


def find_install() -> Install:
    """Find the vLLM package that is installed for this Python, without importing it. Raise
    BackendRefused if vLLM is not installed."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or importlib.util.find_spec("vllm") is None:
        raise BackendRefused(
            "vLLM is not installed: pip install -e '.[vllm]', "
            "or on a CPU server/cpu/make_environment.sh FOLDER"
        )
    return Install(version)
