"""`fakevllm up` and `fakevllm down`: one command for server and proxy, in front and in the
background."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.run_log_reader import read_step_entries
from fakevllm.processes.pid_file import NAME, running_pid
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.e2e.test_commands import assert_mistake, run

UP = ("-m", "fakevllm", "up")
DOWN = ("-m", "fakevllm", "down")
HI: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
SERVER, PROXY, CONSOLE = ("fakevllm_server",), ("fakevllm", "serve"), ("fakevllm", "console")
"""Arguments in the command lines of the programs."""
WAIT_S = 40.0
CTRL_C = b"\x03"
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Program that runs a command in a terminal of its own, whose keyboard is the standard input."""
END_S = 60.0


def write_config(folder: Path, server: str = 'backend = "fake"\n') -> dict[str, int]:
    """Write hooks and fakevllm.toml, and return the port of each program."""
    folder.mkdir(parents=True, exist_ok=True)
    write_hooks(folder / "hooks", PREFER_YES)
    ports = {name: free_port() for name in ("server", "proxy", "console")}
    (folder / "fakevllm.toml").write_text(
        f'[proxy]\nport = {ports["proxy"]}\nrun_dir = "run"\n'
        f"[console]\nport = {ports['console']}\n"
        '[hooks]\npath = "hooks"\n'
        "[job]\nnum_repeat = 4\nbatch_size = 1\nlr = 0.1\n"
        f"[server]\nport = {ports['server']}\n{server}"
    )
    return ports


def started_up(
    processes: Processes, server: str = 'backend = "fake"\n'
) -> tuple[Process, dict[str, int]]:
    """Start `fakevllm up`, and return it with the port of each program."""
    folder = processes.folder / "up"
    ports = write_config(folder, server)
    return processes.adopt(Process("up", UP, ports["proxy"], folder)), ports


def wait_for_line(up: Process, text: str) -> None:
    wait_until(lambda: text in up.log, WAIT_S, lambda: f"{text!r} in the log:\n{up.log}")


def train_steps(url: str, run_dir: Path, num_steps: int) -> None:
    """Send requests until so many further steps are trained."""
    before = len(read_step_entries(run_dir))

    def has_steps() -> bool:
        httpx.post(f"{url}/v1/chat/completions", json=HI, timeout=60).raise_for_status()
        return len(read_step_entries(run_dir)) >= before + num_steps

    wait_until(has_steps, WAIT_S, f"{num_steps} steps")


def child_of(pid: int, *arguments: str) -> int:
    """Return the id of the child process whose command line has these arguments in a row."""
    wanted = b"\0".join(map(str.encode, ("", *arguments, "")))
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == pid and wanted in command:
                found.append(int(folder.name))
    (child,) = found
    return child


def are_refused(ports: Iterable[int]) -> bool:
    """Return True if nothing listens on any of the ports."""
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return False
    return True


def test_one_command_answers_and_trains_and_a_killed_server_comes_back(
    processes: Processes,
) -> None:
    up, ports = started_up(processes)
    run_dir = up.folder / "run"
    wait_for_line(up, "ready: apps use")
    console, server = (f"http://127.0.0.1:{ports[name]}" for name in ("console", "server"))
    addresses = f"apps use {up.url}/v1, the console is {console}, the server is {server}"
    assert f"up      | ready: {addresses}\n" in up.log
    (link,) = re.findall(rf"console \| .*({console}/login\?code=\S+)", up.log)
    assert httpx.get(link).status_code == 200
    train_steps(up.url, run_dir, 1)
    os.kill(child_of(up.pid, *SERVER), signal.SIGKILL)
    train_steps(up.url, run_dir, 2)
    assert "up      | the server died (exit code -9) and is started again" in up.log
    os.kill(child_of(up.pid, *PROXY), signal.SIGKILL)
    train_steps(up.url, run_dir, 1)
    assert "up      | the proxy died (exit code -9) and is started again" in up.log
    assert up.log.count("ready: apps use") == 1 and "\x1b" not in up.log


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_a_signal_stops_the_proxy_and_then_the_server(
    processes: Processes, number: signal.Signals, code: int
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this test run ignores the signal, as under nohup, and so do its processes")
    up, ports = started_up(processes)
    wait_for_line(up, "ready: apps use")
    up.signal(number)
    wait_until(lambda: up.returncode is not None, END_S, "the end")
    assert up.returncode == code, up.log
    lines = up.log.splitlines()
    ends = [line.split(" | ")[0].strip() for line in lines if line.endswith(": stopped")]
    assert [end for end in ends if end in ports] == ["console", "proxy", "server"]
    assert "Traceback" not in up.log
    assert are_refused(ports.values())
    assert running_pid(up.folder / "run") is None


def test_apps_are_served_while_the_console_dies_again_and_again(processes: Processes) -> None:
    up, _ = started_up(processes)
    wait_for_line(up, "ready: apps use")
    killed: set[int] = set()

    def is_given_up() -> bool:
        with suppress(ValueError):  # it is being started again
            pid = child_of(up.pid, *CONSOLE)
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return "everything else goes on" in up.log

    wait_until(is_given_up, END_S, "the end of the attempts")
    httpx.post(f"{up.url}/v1/chat/completions", json=HI, timeout=60).raise_for_status()
    assert up.returncode is None and len(killed) > 1


def test_without_the_console_nothing_listens_on_its_port(processes: Processes) -> None:
    folder = processes.folder / "up"
    ports = write_config(folder)
    file = folder / "fakevllm.toml"
    file.write_text(file.read_text().replace("[console]\n", "[console]\nenabled = false\n"))
    up = processes.adopt(Process("up", UP, ports["proxy"], folder))
    wait_for_line(up, f"ready: apps use {up.url}/v1, the server is ")
    assert are_refused([ports["console"]]) and "console |" not in up.log


def test_a_second_signal_kills_a_program_that_does_not_stop(processes: Processes) -> None:
    up, ports = started_up(processes)
    wait_for_line(up, "ready: apps use")
    os.kill(child_of(up.pid, *PROXY), signal.SIGSTOP)
    up.signal(signal.SIGINT)
    wait_for_line(up, "a second Ctrl-C kills them")
    assert up.returncode is None
    up.signal(signal.SIGINT)
    wait_until(lambda: up.returncode is not None, END_S, "the end")
    assert up.returncode == 130, up.log
    assert "is started again" not in up.log
    wait_until(lambda: are_refused(ports.values()), END_S, "the end of their child processes")


def test_an_engine_that_cannot_start_ends_all_with_its_reason(tmp_path: Path) -> None:
    write_config(tmp_path, 'model = "model"\n')
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    assert_mistake(run(tmp_path, *UP), "The engine did not start: ")
    assert running_pid(tmp_path / "run") is None


def test_a_closed_output_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    command = f"{shlex.join([sys.executable, *UP])} >&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("fakevllm: The standard output is closed: ")


def test_ctrl_c_in_a_terminal_reaches_the_proxy_before_the_server(tmp_path: Path) -> None:
    write_config(tmp_path)
    command = [sys.executable, "-c", IN_A_TERMINAL, sys.executable, *UP]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe) as terminal:
        assert terminal.stdin is not None and terminal.stdout is not None
        assert any(b"ready: apps use" in line for line in terminal.stdout)
        output, _ = terminal.communicate(CTRL_C, timeout=END_S)
    assert terminal.returncode == 130
    assert re.findall(rb"m(\w+) +\|.* stopped\r", output) == [b"console", b"proxy", b"server"]
    assert output.endswith(b"fakevllm: stopped\r\n")


def test_if_the_command_itself_is_killed_no_program_is_left(processes: Processes) -> None:
    up, ports = started_up(processes)
    wait_for_line(up, "ready: apps use")
    up.kill()
    wait_until(lambda: are_refused(ports.values()), END_S, "the end of all")
    up.start()
    up.wait_until_healthy()
    train_steps(up.url, up.folder / "run", 1)


@contextmanager
def detached(folder: Path) -> Generator[subprocess.CompletedProcess[str]]:
    """Run `fakevllm up --detach`, and stop what it started when the block ends."""
    try:
        yield run(folder, *UP, "--detach", timeout_s=WAIT_S)
    finally:
        if running_pid(folder / "run") is not None:
            run(folder, *DOWN, timeout_s=END_S)
        assert running_pid(folder / "run") is None


def test_in_the_background_it_answers_until_down_stops_it(tmp_path: Path) -> None:
    ports = write_config(tmp_path)
    url = f"http://127.0.0.1:{ports['proxy']}"
    with detached(tmp_path) as done:
        assert done.returncode == 0, done.stderr
        assert f"ready: apps use {url}/v1" in done.stdout and "up.log" in done.stdout
        train_steps(url, tmp_path / "run", 1)
        for flags in ((), ("--detach",)):
            assert_mistake(run(tmp_path, *UP, *flags), "runs already on run (process ")
        httpx.get(f"{url}/health").raise_for_status()
        stopped = run(tmp_path, *DOWN, timeout_s=END_S)
        assert stopped.returncode == 0 and "Stopped `fakevllm up` on run." in stopped.stdout
    assert are_refused(ports.values())
    log = (tmp_path / "run/up.log").read_text()
    assert "ready: apps use" in log and log.endswith("up      | stopped\n")


def test_ctrl_c_during_a_start_in_the_background_stops_the_start(tmp_path: Path) -> None:
    write_config(tmp_path, 'backend = "fake"\nkey-file = "keys"\n')
    (tmp_path / "keys").write_text("sk-a-key-that-the-proxy-does-not-have\n")
    command = [sys.executable, *UP, "--detach"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"FAKEVLLM_SWARM_KEY": "sk-another-key"},
    ) as starting:
        assert starting.stdout is not None and "listening on" in starting.stdout.readline()
        assert running_pid(tmp_path / "run") not in (None, starting.pid)
        starting.send_signal(signal.SIGINT)
        starting.communicate(timeout=END_S)
    assert starting.returncode == 130 and running_pid(tmp_path / "run") is None


def test_down_without_anything_running_stops_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert_mistake(run(tmp_path, *DOWN), "No `fakevllm up` runs on run")
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / NAME).write_text(f"{other.pid}\n")  # a number that was used before
        assert_mistake(run(tmp_path, *DOWN), "No `fakevllm up` runs on run")
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("flags", [(), ("--detach",)], ids=["in front", "detached"])
@pytest.mark.parametrize("taken", ["server", "proxy", "console"])
def test_a_port_in_use_is_refused_with_the_setting(
    tmp_path: Path, taken: str, flags: tuple[str, ...]
) -> None:
    ports = write_config(tmp_path)
    with socket.create_server(("127.0.0.1", ports[taken])):
        done = run(tmp_path, *UP, *flags)
    assert_mistake(done, f"127.0.0.1:{ports[taken]} cannot be used (Address already in use)")
    assert f"choose another `port` under [{taken}] of fakevllm.toml." in done.stderr
    assert are_refused(ports.values())


def test_a_proxy_that_refuses_its_hooks_ends_all_with_one_line(tmp_path: Path) -> None:
    ports = write_config(tmp_path)
    (tmp_path / "hooks/on_compute_relative_reward.py").unlink()
    done = run(tmp_path, *UP)
    assert_mistake(done, "the proxy does not stay up (exit code 2): ")
    assert are_refused(ports.values()) and running_pid(tmp_path / "run") is None


def test_a_server_whose_run_directory_is_in_use_ends_all_with_one_line(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    folder = processes.folder / "up"
    ports = write_config(folder, f'backend = "fake"\nrun-dir = "{server.folder}"\n')
    done = run(folder, *UP)
    assert_mistake(done, "the server does not stay up (exit code 2): ")
    assert "is used by another server" in done.stderr and are_refused(ports.values())
    assert server.returncode is None


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ('backend = "fake"\nprot = 1\n', "Unknown key `prot` in [server] of fakevllm.toml"),
        ('model = "nowhere"\n', "The model folder 'nowhere' does not exist"),
    ],
)
def test_a_mistake_in_the_table_of_the_server_is_its_own_message(
    tmp_path: Path, server: str, message: str
) -> None:
    write_config(tmp_path, server)
    for flags in ((), ("--detach",)):
        assert_mistake(run(tmp_path, *UP, *flags), message)
    assert not (tmp_path / "run").exists()
