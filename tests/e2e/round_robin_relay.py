"""A TCP load balancer: each new connection goes to the next server.

    async with round_robin_relay([8001, 8002]) as port:
        ...

As a program, it takes `--port PORT` and the ports of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 65_536


@asynccontextmanager
async def round_robin_relay(upstream_ports: Sequence[int], port: int = 0) -> AsyncGenerator[int]:
    """Relay connections to the servers while the `with` block runs. Yield the relay's port."""
    next_port = itertools.cycle(upstream_ports)
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        task.add_done_callback(handlers.discard)
        upstream = None
        try:
            with suppress(OSError, asyncio.CancelledError):  # the end of the relay cancels it
                upstream = await asyncio.open_connection("127.0.0.1", next(next_port))
                await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))
        finally:
            writer.close()
            if upstream is not None:
                upstream[1].close()

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _relay_until_stdin_closes(port: int, upstream_ports: Sequence[int]) -> None:
    async with round_robin_relay(upstream_ports, port):
        await asyncio.to_thread(sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("upstream_ports", type=int, nargs="+")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-closes", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(_relay_until_stdin_closes(arguments.port, arguments.upstream_ports))


if __name__ == "__main__":
    main()
