"""A proxy is restarted with hooks on another scale, on the same ledger and the same server."""

from __future__ import annotations

import json

import httpx

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_commands import SERVER, run
from tests.e2e.test_traffic import answered, command, config

TEN_TIMES = PREFER_YES.replace("float(", "10 * float(")
JOB = '[job]\nbatch_size = 1\nsave_freq = 1\nlr = 0.1\nfilter_groups = "keep"\n'


def test_the_status_and_the_best_checkpoint_break_where_the_hooks_change(
    processes: Processes,
) -> None:
    hooks = write_hooks(processes.folder / "hooks", PREFER_YES)
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *config(processes, JOB), "--hooks", str(hooks), "--n", "4")
    train(proxy, 2)
    assert "curve" not in command(proxy, "status")
    proxy.stop()
    write_hooks(hooks, TEN_TIMES)
    proxy.start()
    proxy.wait_until_healthy()
    train(proxy, 4)
    status = " ".join(command(proxy, "status").split())
    assert "begins at step 3: the hooks changed" in status.replace(" │ │ │ ", " ")
    curve = httpx.get(f"{proxy.url}/fakevllm/stats").json()["curve"]
    assert [step["changed"] for step in curve][:4] == ["", "", "the hooks changed", ""]
    assert curve[0]["hooks"] != curve[2]["hooks"] and curve[0]["jobs"] == curve[2]["jobs"]
    assert len({row["job_hash"] for row in rows(proxy, "SELECT job_hash FROM groups")}) == 1
    assert server.log.count("step 3: the hooks changed") == 1
    shown = run(server.folder, *SERVER, "checkpoints", "list", "--run-dir", ".").stdout
    assert "At step 3 the hooks changed." in " ".join(shown.split())
    once = run(
        server.folder, "-m", "fakevllm", "overwatch", "--once", "--swarm-url", server.url
    ).stdout
    assert "step 3: the hooks changed; earlier rewards are not comparable" in once
    listing = run(server.folder, *SERVER, "checkpoints", "list", "--json", "--run-dir", ".")
    assert all(row["step"] >= 3 for row in json.loads(listing.stdout) if row["is_best"])


def train(proxy: Process, last_step: int) -> None:
    """Send one request for each step until the step `last_step` is trained."""
    while (step := step_of(proxy)) <= last_step:
        answered(proxy)
        wait_until(lambda: step_of(proxy) > step, 60.0, f"step {step}")


def step_of(proxy: Process) -> int:
    return httpx.get(f"{proxy.url}/fakevllm/engine").json()["global_step"]
