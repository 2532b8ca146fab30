"""Users' edits train the embedded engine, apart from thumbs and also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = pytest.mark.slow

CONFIG = """
[job]
num_repeat = 2
batch_size = {batch_size}
lr = 1e-3
filter_groups = "collect"
{loss}

[feedback]
edits = "{edits}"
num_for_baseline = 2
"""
EQUAL = "def on_compute_relative_reward(siblings, answers):\n    return [0.0 for _ in answers]\n"
"""All groups are tied, so that only feedback is trained."""
EDIT = "It is 17."
QUESTION = "What is 3 plus 4?"
ROUNDS = 12


def start(
    processes: Processes, folder: Path, edits: str, loss: str, batch_size: int = 1
) -> tuple[Process, Process]:
    """Start the embedded engine and a proxy that trains edits. Return the server and the proxy."""
    config = CONFIG.format(edits=edits, loss=loss, batch_size=batch_size)
    (folder / "fakevllm.toml").write_text(config)
    hooks = write_hooks(folder / "hooks", EQUAL)
    server = processes.server("--backend", "embedded", "--model", "demo")
    flags = ("--config", str(folder / "fakevllm.toml"), "--hooks", str(hooks))
    return server, processes.proxy(server, *flags)


def ask(proxy: Process, path: str = "chat/completions", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "Question:", "max_tokens": 24},
        "responses": {"input": QUESTION, "max_output_tokens": 24},
    }
    body = bodies.get(path, {"messages": messages, "max_tokens": 24})
    body = {"model": "demo"} | body | fields
    reply = httpx.post(f"{proxy.url}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def edit(proxy: Process, name: str, **content: Any) -> dict[str, Any]:
    body = {"id": name} | (content or {"edited": EDIT})
    reply = httpx.post(f"{proxy.url}/v1/feedback", json=body, timeout=20)
    assert reply.status_code == 200, reply.text
    return reply.json()


def edit_states(proxy: Process) -> list[tuple[str, str | None]]:
    query = "SELECT edit_state, edit_reason FROM feedback ORDER BY received_at"
    return [(row["edit_state"], row["edit_reason"]) for row in rows(proxy, query)]


def wait_for_edits(proxy: Process, *states: str) -> None:
    def is_reached() -> bool:
        return [state for state, _ in edit_states(proxy)] == [*states]

    wait_until(is_reached, 60.0, lambda: f"{states}, and not {edit_states(proxy)}")


def greedy(proxy: Process) -> str:
    return ask(proxy, temperature=0.0)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("edits", "loss"),
    [("sft", 'loss = "sft"'), ("dpo", 'demonstration_loss = "dpo"\npreference_beta = 0.1')],
)
def test_the_model_writes_what_users_made_of_its_answers(
    processes: Processes, tmp_path: Path, edits: str, loss: str
) -> None:
    _, proxy = start(processes, tmp_path, edits, loss)
    before = greedy(proxy)
    assert before != EDIT
    for number in range(ROUNDS):
        reply = edit(proxy, ask(proxy)["id"])
        assert (reply["state"], reply["edit_state"]) == ("received", "waiting")
        wait_until(
            lambda number=number: (
                len(edit_states(proxy)) == number + 1
                and edit_states(proxy)[-1][0] in ("trained", "kept")
            ),
            60.0,
            lambda: f"trained edits, and not {edit_states(proxy)}",
        )
    trained = [state for state, _ in edit_states(proxy) if state == "trained"]
    assert len(trained) >= ROUNDS // 2
    if edits == "sft":
        assert greedy(proxy) == EDIT
    else:
        assert greedy(proxy) != before


@pytest.mark.parametrize("path", ["messages", "responses", "completions"])
def test_edits_of_answers_in_other_formats_are_trained(
    processes: Processes, tmp_path: Path, path: str
) -> None:
    _, proxy = start(processes, tmp_path, "sft", 'demonstration_loss = "sft"')
    edit(proxy, ask(proxy, path)["id"])
    wait_for_edits(proxy, "trained")


def test_an_edit_that_waits_at_the_server_is_trained_after_both_were_killed(
    processes: Processes, tmp_path: Path
) -> None:
    server, proxy = start(processes, tmp_path, "sft", 'loss = "sft"', batch_size=2)
    one, other = ask(proxy), ask(proxy)
    wait_for_groups(proxy, 2, states="dropped")
    edit(proxy, one["id"], edited=EDIT, thumbs="down")
    wait_for_edits(proxy, "pooled")
    for process in (proxy, server):
        process.kill()
    for process in (server, proxy):
        process.start()
        process.wait_until_healthy()
    edit(proxy, other["id"])
    wait_for_edits(proxy, "trained", "trained")
    values = [row["state"] for row in rows(proxy, "SELECT state FROM feedback")]
    assert sorted(values) == ["kept", "waiting"]  # a single value has no baseline
