"""Measure how the tokens per second grow with the number of rollout replicas.

    python -m benchmarks.fleet_scaling [--replicas 1 2 3] [--seconds 10] [--write]

Each replica is a fake engine. It takes a fixed time for each token, and samples a fixed number of
answers at the same time, as a GPU does. The measured loss is therefore that of the server: of its
router, and of relaying and capturing the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SESSION_HEADER
from tests.e2e.fleet import Fleet
from tests.e2e.processes import Processes

TITLE = "fleet scaling"
HEADER = ("replicas", "tokens/s", "ideal", "share of ideal", "share of linear")
GOAL = 0.95
"""Share of linear growth that a fleet should reach."""
TOKEN_DELAY_S = 0.02
SLOTS = 16
"""Number of answers that each replica samples at the same time."""
CLIENTS_PER_SLOT = 2
"""More clients than slots keep each replica busy while an answer travels."""
ANSWER = "tokens " * 8
"""Text of each answer. The fake engine has one token for each byte, and one for the end."""
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Measurement:
    num_replicas: int
    tokens_per_s: float

    @property
    def ideal(self) -> float:
        """Tokens per second of engines that never wait for a call."""
        return self.num_replicas * SLOTS / TOKEN_DELAY_S

    def row(self, one: Measurement) -> list[str]:
        """Return the row of the table. `one` is the measurement of one replica."""
        linear = one.tokens_per_s / one.num_replicas * self.num_replicas
        return [
            str(self.num_replicas),
            f"{self.tokens_per_s:,.0f}",
            f"{self.ideal:,.0f}",
            f"{self.tokens_per_s / self.ideal:.3f}",
            f"{self.tokens_per_s / linear:.3f}",
        ]


class Load:
    """Clients that send one call after the other, and count the tokens of the answers."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self.num_tokens = 0

    async def run(self, num_clients: int, seconds: float) -> float:
        """Return the tokens per second after a warm-up."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            clients = [asyncio.create_task(self._client(http, at)) for at in range(num_clients)]
            await asyncio.sleep(WARM_UP_S)
            started, before = time.monotonic(), self.num_tokens
            await asyncio.sleep(seconds)
            rate = (self.num_tokens - before) / (time.monotonic() - started)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return rate

    async def _client(self, http: aiohttp.ClientSession, number: int) -> None:
        prompt = f"client {number}: [[say {ANSWER}]]"
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        headers = {SESSION_HEADER: f"client-{number}"}
        while True:
            async with http.post(self._url, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
                self.num_tokens += answer["usage"]["completion_tokens"]


def measure(num_replicas: int, seconds: float) -> Measurement:
    """Start a server with this number of replicas, and measure it."""
    arguments = [f"--token-delay-s={TOKEN_DELAY_S}", f"--max-num-seqs={SLOTS}"]
    flags = [f"--engine-arg={argument}" for argument in arguments]
    with tempfile.TemporaryDirectory() as name, Processes(Path(name), shows_logs=False) as started:
        server = started.server("--backend", "fake", "--replicas", str(num_replicas), *flags)
        with Fleet(server) as fleet:
            fleet.start(TrainJob())
            num_clients = num_replicas * SLOTS * CLIENTS_PER_SLOT
            rate = asyncio.run(Load(server.url, fleet.model).run(num_clients, seconds))
    return Measurement(num_replicas, rate)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="Write the table into RESULTS.md.")
    options = parser.parse_args(arguments)
    head = conditions()
    measured = [measure(number, options.seconds) for number in options.replicas]
    rows = [each.row(measured[0]) for each in measured]
    print_table(HEADER, rows, TITLE)
    text = (
        f"Each replica takes {1000 * TOKEN_DELAY_S:g} ms for a token, and samples {SLOTS} answers "
        f"at the same time. There are {CLIENTS_PER_SLOT} clients for each of these answers. The "
        f"goal is {GOAL} of linear growth."
    )
    print(text)
    if options.write:
        replace_section(TITLE, f"{head}\n{markdown_table(HEADER, rows)}\n{text}")


if __name__ == "__main__":
    main()
