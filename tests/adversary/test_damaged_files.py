"""Files of a used run that were damaged while nothing ran: by a crash of the machine, or by hand.

Each case damages one file and starts the server or the proxy on it. The start must succeed, or end
with a message of one line that names the file. A damaged file may never cause a traceback, and
never a second training of the same group.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.model import Config
from fakevllm.errors import UserError
from fakevllm.hooks.loader import load_hooks
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.server_state import ServerState
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Processes

pytestmark = pytest.mark.slow

START_LIMIT_S = 30.0
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
DEEP = b"[" * 100_000

Damage = Callable[[Path], object]


def write(content: bytes) -> Damage:
    def damage(file: Path) -> None:
        file.write_bytes(content)

    return damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def make_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    (file / "x").mkdir(parents=True)


def make_loop(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file)


DAMAGES: dict[str, Damage] = {
    "is empty": write(b""),
    "is cut off": cut,
    "is noise": write(b"\xff\xfe\x00" * 50),
    "has other JSON": write(b'["x", 5]'),
    "has JSON without its keys": write(b"{}"),
    "is nested deep": write(DEEP),
    "is a folder": make_folder,
    "is a link to itself": make_loop,
}


@pytest.fixture(scope="module")
def used_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders of a server and of a proxy that have trained six groups, and have stopped."""
    folder = tmp_path_factory.mktemp("used")
    with Processes(folder) as started:
        hooks = write_hooks(folder / "hooks", PREFER_YES)
        config = folder / "fakevllm.toml"
        config.write_text(
            "[job]\nnum_repeat = 2\nbatch_size = 2\nlr = 0.1\nfilter_groups = false\n"
        )
        server = started.server("--backend", "fake")
        proxy = started.proxy(server, "--hooks", str(hooks), "--config", str(config))
        for _ in range(6):
            httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=30)
        wait_for_groups(proxy, 6, states="trained")
        assert [proxy.stop(), server.stop()] == [0, 0]
        yield folder


@pytest.fixture
def folder(used_run: Path, tmp_path: Path) -> Path:
    """A copy of the used run."""
    return Path(shutil.copytree(used_run, tmp_path / "run"))


def check_message(error: UserError, file: Path) -> None:
    """Check that the message has one line, and names the file or its folder."""
    message = str(error)
    assert "\n" not in message and len(message) < 2000
    assert str(file) in message or str(file.parent) in message, message


async def start_server(run_dir: Path, *, with_engine: bool = True) -> None:
    """Start a server on a run directory, and stop it. Raises UserError."""
    server = ServerState(ServerConfig("fake", run_dir))
    try:
        assert server.job is not None
        if not with_engine:
            return
        async with server.engine_lock:
            await server.start_engine()
        async with asyncio.timeout(START_LIMIT_S):
            while server.engine.status is not EngineStatus.ROLLING:
                assert "see the server's log" not in (server.engine.detail or "")
                await server.engine.next_move()
    finally:
        await server.close()


async def start_proxy(run_dir: Path) -> None:
    """Start a proxy on a run directory, send a request, and stop it. Raises UserError."""
    sections: Any = {
        "proxy": {"run_dir": run_dir},
        "swarm": {"url": "http://127.0.0.1:9"},
        "upstream": {"hold_s": 0.0},
    }
    async with open_proxy(Config.model_validate(sections)) as parts:
        transport = httpx.ASGITransport(create_app(parts))  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as app:
            answer = await app.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert (await app.get("/fakevllm/stats")).status_code in (200, 503)
            assert (await app.get("/v1/responses/resp_1")).status_code in (404, 503)
            body = {"model": "fake", "input": "hi", "previous_response_id": "resp_1"}
            answer = await app.post("/v1/responses", json=body)
            assert answer.status_code in (404, 503), answer.text


def trained_groups(run_dir: Path) -> list[Any]:
    """Return the groups of the journal that are trained."""
    with closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as db:
        return db.execute("SELECT group_id, step FROM groups WHERE state = 'consumed'").fetchall()


SERVER_FILES = {
    "run.json": True,
    "model.json": True,
    "run_id": False,
    "lock": False,
    "current_run": True,
    "checkpoints": False,
}
"""Maps the name of each file of the run directory to True if the file is read only when the engine
starts."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", SERVER_FILES)
def test_a_server_starts_with_a_damaged_file_or_names_it(
    folder: Path, name: str, damage: str
) -> None:
    file = folder / "server" / name
    if file.is_dir():
        shutil.rmtree(file)
        file.touch()
    if name == "current_run":
        file.write_text(".\n")  # the server writes this file only if it has several runs
    DAMAGES[damage](file)
    before = trained_groups(folder / "server")
    try:
        asyncio.run(start_server(folder / "server", with_engine=SERVER_FILES[name]))
    except UserError as error:
        check_message(error, file)
    assert trained_groups(folder / "server") == before


def checkpoint_file(folder: Path) -> Path:
    """Return a file of the newest checkpoint."""
    newest = max((folder / "server" / "checkpoints").glob("step-*"))
    return next(path for path in sorted(newest.rglob("*")) if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_server_starts_with_a_damaged_checkpoint_and_trains_no_group_twice(
    folder: Path, damage: str
) -> None:
    before = trained_groups(folder / "server")
    DAMAGES[damage](checkpoint_file(folder))
    asyncio.run(start_server(folder / "server"))
    assert set(trained_groups(folder / "server")) <= set(before)


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("damage", ["is empty", "is noise", "is a folder"])
@pytest.mark.parametrize("database", ["server/journal.sqlite", "proxy/ledger.sqlite"])
def test_a_leftover_beside_a_database_is_ignored_or_named(
    folder: Path, database: str, damage: str, suffix: str
) -> None:
    file = folder / f"{database}{suffix}"
    DAMAGES[damage](file)
    start = start_server if "journal" in database else start_proxy
    try:
        asyncio.run(start(file.parent))
    except UserError as error:
        check_message(error, file)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite.lock", "paused"])
def test_a_proxy_starts_with_a_damaged_file_or_names_it(
    folder: Path, name: str, damage: str
) -> None:
    file = folder / "proxy" / name
    if name == "paused":
        file.touch()
    DAMAGES[damage](file)
    try:
        asyncio.run(start_proxy(folder / "proxy"))
    except UserError as error:
        check_message(error, file)


def test_a_proxy_starts_with_a_ledger_with_any_damaged_page_or_names_it(folder: Path) -> None:
    file = folder / "proxy" / "ledger.sqlite"
    whole = file.read_bytes()
    page = int.from_bytes(whole[16:18], "big")
    num_refused = 0
    for start in range(0, len(whole), page):
        for noise in (b"\xa5" * page, bytes(page)):
            file.write_bytes(whole[:start] + noise + whole[start + page :])
            try:
                asyncio.run(start_proxy(folder / "proxy"))
            except UserError as error:
                num_refused += 1
                check_message(error, file)
            for leftover in file.parent.glob("ledger.sqlite-*"):
                leftover.unlink()
    assert num_refused > 0


HOOK_FILES: dict[str, bytes] = {
    "is empty": b"",
    "is noise": b"\xff\xfe\x00" * 50,
    "has a NUL": PREFER_YES.encode() + b"\0",
    "is UTF-16": PREFER_YES.encode("utf-16"),
    "declares an unknown encoding": b"# coding: nothing\n" + PREFER_YES.encode(),
    "is nested deep": b"x = " + b"(" * 5000 + b")" * 5000,
    "has a very long expression": b"x = " + b"+".join([b"1"] * 100_000),
    "is cut off": PREFER_YES.encode()[:60],
    "raises an error without a message": b"raise Exception",
    "ends the process when it is imported": b"raise SystemExit(3)",
    "interrupts when it is imported": b"raise KeyboardInterrupt",
}


@pytest.mark.parametrize("content", HOOK_FILES.values(), ids=HOOK_FILES)
def test_a_damaged_hook_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "on_compute_relative_reward.py"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        load_hooks(tmp_path)
    check_message(refused.value, file)


@pytest.mark.parametrize("damage", ["is a folder", "is a link to itself"])
def test_a_hook_file_that_is_no_file_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "on_compute_relative_reward.py"
    DAMAGES[damage](file)
    with pytest.raises(UserError) as refused:
        load_hooks(tmp_path)
    check_message(refused.value, file)
