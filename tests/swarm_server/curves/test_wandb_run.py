"""Curves of real journals in wandb's offline files, compared with those in TensorBoard's files."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.curves.tracker_process import ProcessFollower
from fakevllm_server.curves.wandb_run import WandbState, with_pending
from tests.e2e.processes import wait_until
from tests.swarm_server.curves.charted_run import Run, until
from tests.swarm_server.curves.wandb_rows import WandbRows, is_same, needs_wandb

API_KEY = "0123456789" * 4
STEP = "training/global_step"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def write_rows(run: Run, close_limit_s: float = 120.0) -> None:
    """Let a server's process for wandb write the curves, and wait for its end."""
    assert run.process.journal.drain()
    follower = ProcessFollower(run.folder, "wandb", close_limit_s=close_limit_s)
    follower.start()
    wait_until(lambda: follower.pid is not None, 60)
    follower.close()


@needs_wandb
async def test_a_run_has_the_same_curves_in_wandb_and_in_tensorboard(run: Run) -> None:
    await run.evaluate(0.0)
    await run.train("a", "b", hooks="first")
    await run.evaluate(0.25)
    await run.decide(Decision.CANDIDATE, 2)
    await run.decide(Decision.RELEASED, 2)
    await run.train("c", hooks="second")
    await run.decide(Decision.HOLD)
    run.chart(is_last=True)
    write_rows(run)
    rows = WandbRows(run.folder)
    in_wandb, in_tensorboard = rows.points(), run.charts.all_points()
    assert in_wandb.keys() == in_tensorboard.keys()
    assert "fakevllm/releases/released" in in_wandb and "val/reward/mean" in in_wandb
    for name in in_wandb.keys() - {STEP}:
        pairs = zip(in_wandb[name], in_tensorboard[name], strict=True)
        assert all(x == y and is_same(v, w) for (x, v), (y, w) in pairs), name
    assert rows.x_axis == {"*": STEP}
    assert rows.texts("fakevllm/releases") == [
        (2, "Version 2: candidate by the release gate."),
        (2, "Version 2: released by the release gate."),
        (3, "Releases: hold by the release gate."),
    ]
    assert "the hooks changed" in rows.texts("fakevllm/reward_changes")[0][1]


@needs_wandb
async def test_wandb_gets_nothing_but_the_curves(run: Run) -> None:
    await run.train("a")
    write_rows(run)
    rows = WandbRows(run.folder)
    assert rows.kinds <= {"header", "run", "exit", "history", "summary", "metric", "telemetry"}
    for secret in (socket.gethostname(), os.path.expanduser("~"), str(run.folder)):
        assert secret.encode() not in rows.raw, secret
    (file,) = rows.files
    assert list((file.parent / "files").iterdir()) == []


@needs_wandb
async def test_a_restarted_server_continues_the_run_of_wandb_without_double_rows(run: Run) -> None:
    await run.train("a", "b", "c")  # saved at 2
    write_rows(run)
    write_rows(run)
    await run.crash()
    await run.catch_up()  # step 3 again
    await run.train("d")
    write_rows(run)
    rows = WandbRows(run.folder)
    assert len({file.name for file in rows.files}) == 1, "one id"
    assert len(rows.files) == 2, "a server without new points opens no run"
    numbers = [row["_step"] for row in rows.rows]
    assert numbers == list(range(len(numbers)))
    assert [step for step, _ in rows.points()["critic/score/mean"]] == [1, 2, 3, 3, 4]


@needs_wandb
async def test_rows_that_may_have_been_sent_already_keep_their_numbers(run: Run) -> None:
    await run.train("a")
    write_rows(run)
    state = (run.folder / "wandb/fakevllm.json").read_text()
    await run.train("b")
    write_rows(run)
    (run.folder / "wandb/fakevllm.json").write_text(state)  # the process died before it wrote it
    write_rows(run)
    assert [(row["_step"], row[STEP]) for row in WandbRows(run.folder).rows] == [
        *((0, 1), (1, 2), (1, 2)),
    ]


def test_rows_that_may_have_been_sent_keep_their_numbers_and_other_rows_get_new_ones() -> None:
    first, second, other = {"a": 1}, {"a": 2}, {"b": 1}
    state = with_pending(WandbState("run", num_rows=5), [first])
    assert state.num_rows == 5
    assert with_pending(state, [first]).num_rows == 5
    assert with_pending(state, [first, second]).num_rows == 5
    assert with_pending(state, [other, first]).num_rows == 6
    state = with_pending(state, [first, second])
    assert with_pending(state, [first]).num_rows == 7, "fewer rows than were sent are other rows"


@needs_wandb
async def test_rows_are_written_while_the_run_goes_on_also_after_the_process_was_killed(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    follower = ProcessFollower(
        run.folder, "wandb", every_s=0.05, restart_s=0.1, close_limit_s=120.0
    )
    follower.start()
    await run.train("a")
    await until(lambda: WandbRows(run.folder).rows)
    pid = follower.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: follower.pid not in (pid, None))
    await run.train("b")
    assert run.process.journal.drain()
    follower.close()
    assert "The process for wandb curves ended with exit code -9" in caplog.text
    assert [row[STEP] for row in WandbRows(run.folder).rows] == [1, 2]


async def test_a_line_says_that_the_last_curves_of_a_dead_process_are_not_written(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    follower = ProcessFollower(run.folder, "wandb")
    follower.start()
    await until(lambda: follower.pid is not None)
    assert follower.pid is not None
    os.kill(follower.pid, signal.SIGKILL)
    await until(lambda: "retrying" in caplog.text)
    follower.close()
    assert "The last wandb curves are not written" in caplog.text


@needs_wandb
async def test_the_process_ends_with_its_server(run: Run) -> None:
    await run.train("a")
    assert run.process.journal.drain()
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [
            sys.executable,
            "-m",
            "fakevllm_server.curves.tracker_process",
            "wandb",
            str(run.folder),
            "5",
        ],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_CLOSE, write)],
    )
    os.close(read)
    os.close(write)  # as when the server is killed
    await until(lambda: os.waitpid(pid, os.WNOHANG) == (pid, 0))
    assert [row[STEP] for row in WandbRows(run.folder).rows] == [1]


class _Refusing(BaseHTTPRequestHandler):
    """wandb's server, which refuses every key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def refusing_server() -> Generator[str]:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def silent_server() -> Generator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@needs_wandb
@pytest.mark.parametrize(
    ("server", "close_limit_s", "problem"),
    [(refusing_server, 120.0, "401"), (silent_server, 5.0, "was ended")],
)
async def test_a_server_of_wandb_that_refuses_or_never_answers_costs_one_line(
    run: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[], AbstractContextManager[str]],
    close_limit_s: float,
    problem: str,
) -> None:
    await run.train("a")
    with server() as url:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", API_KEY)
        write_rows(run, close_limit_s)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "wandb" in line and problem in line and API_KEY not in caplog.text
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_rows(run)
    assert [row[STEP] for row in WandbRows(run.folder).rows] == [1]


@needs_wandb
async def test_a_missing_key_is_named_in_one_line(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    await run.train("a")
    write_rows(run)
    assert "No API key configured" in caplog.text and "WANDB_MODE=offline" in caplog.text
    assert len(caplog.records) == 1


@needs_wandb
async def test_wandb_can_be_turned_off_by_its_own_variable(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    await run.train("a")
    write_rows(run)
    assert "No wandb curves are written: wandb is disabled" in caplog.text


async def test_a_missing_package_and_an_unwritable_folder_cost_one_line_each(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing/wandb.py").write_text("raise ImportError('no wandb here')\n")
    path = os.pathsep.join([str(tmp_path / "missing"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    await run.train("a")
    caplog.clear()
    write_rows(run)
    (record,) = caplog.records
    assert "No wandb curves are written: The package `wandb` cannot be imported" in record.message
    assert "pip install -e '.[wandb]'" in record.message
    assert not (run.folder / "wandb").exists()
    caplog.clear()
    (run.folder / "wandb").write_text("a file at the path of the folder")
    (tmp_path / "missing/wandb.py").write_text("def init(): ...\n")
    write_rows(run)
    (record,) = caplog.records
    assert record.message.startswith("wandb curves cannot be written, retrying: [Errno 17]")
