"""One `--rollout-url` names a load balancer in front of two engines.

The known prompt finds it after the first step that changes the weights. Nothing is trained from
then on, and apps are answered."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import httpx
import openai
import pytest

from fakevllm_adapters.protocol.swarm import CLIENT_HEADER, EngineStatusReply
from tests.e2e import round_robin_relay, vllm_like_engine
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, free_port, wait_until

NUM_APPS = 2
NUM_LATER_REQUESTS = 6
FOUND_TIMEOUT_S = 120.0
MESSAGE = "such as a load balancer"
CONFIG = "[job]\nnum_repeat = 2\nbatch_size = 2\nlr = 0.02\n"
"""A learning rate with which one step changes the weights far more than rounding does."""
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""


def start_engines(processes: Processes) -> list[Process]:
    engines: list[Process] = []
    for name in ("one", "two"):
        port, folder = free_port(), processes.folder / name
        command = [vllm_like_engine.__file__, "--port", str(port)]
        engines.append(processes.adopt(Process(name, command, port, folder)))
    return [engine.wait_until_healthy() for engine in engines]


def start_proxy(processes: Processes, server: Process) -> Process:
    config = processes.folder / "fakevllm.toml"
    config.write_text(CONFIG)
    hooks = write_hooks(processes.folder / "hooks", HOOK)
    return processes.proxy(server, "--config", str(config), "--hooks", str(hooks))


def start_relay(processes: Processes, urls: list[str]) -> Process:
    ports = [url.rpartition(":")[2] for url in urls]
    port = free_port()
    command = [round_robin_relay.__file__, *ports, "--port", str(port)]
    relay = Process("relay", command, port, processes.folder / "relay")
    return processes.adopt(relay).wait_until_healthy()


def ask(proxy: Process, number: int) -> None:
    """Send a request as an app does. An error that the app would see is raised."""
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk", max_retries=0) as app:
        question = f"What is {number % 10} plus 4?"
        reply = app.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], max_tokens=8
        )
    assert reply.choices[0].finish_reason in ("stop", "length")


@contextmanager
def running_apps(proxy: Process) -> Generator[None]:
    """Send requests while the `with` block runs. The first failed request is raised at its end."""
    is_over = Event()

    def run(app: int) -> None:
        number = app
        while not is_over.is_set():
            ask(proxy, number)
            number += NUM_APPS

    with ThreadPoolExecutor(NUM_APPS) as pool:
        apps = [pool.submit(run, app) for app in range(NUM_APPS)]
        try:
            yield
        finally:
            is_over.set()
        for app in apps:
            app.result()


def status(server: Process) -> EngineStatusReply:
    reply = httpx.get(f"{server.url}/get_engine_status", headers={CLIENT_HEADER: "1"}, timeout=30)
    return EngineStatusReply.model_validate(reply.json())


def check_refused_and_served(server: Process, proxy: Process) -> None:
    """Check that the server finds the load balancer while apps are answered, says so in one line,
    and trains nothing more."""
    with running_apps(proxy):
        wait_until(
            lambda: MESSAGE in (status(server).engine_status_detail or ""),
            FOUND_TIMEOUT_S,
            lambda: f"the load balancer to be found; {status(server)}\n{server.log}",
        )
        step = status(server).global_step
        num_groups = rows(proxy, "select count(*) from groups")[0][0]
        wait_for_groups(proxy, num_groups + NUM_LATER_REQUESTS)
    (line,) = [line for line in server.log.splitlines() if MESSAGE in line]
    assert " ERROR " in line and "give --rollout-url once for each engine" in line
    assert status(server).engine_status == "ENGINE.ROLLING"
    assert status(server).global_step == step
    latest = rows(proxy, "select * from groups order by received_at desc limit 3")
    assert {row["reason"] for row in latest} == {"training_refused"}


@pytest.mark.slow
def test_a_load_balancer_in_front_of_two_engines_is_found_and_apps_are_answered(
    processes: Processes,
) -> None:
    engines = start_engines(processes)
    relay = start_relay(processes, [engine.url for engine in engines])
    server = processes.server("--backend", "vllm", "--model", "demo", "--rollout-url", relay.url)
    proxy = start_proxy(processes, server)
    check_refused_and_served(server, proxy)
