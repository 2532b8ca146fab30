"""With the mode `gated`, apps get a version that passed its evaluation. The fake engine samples."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.hook_files import PREFER_YES
from tests.e2e.ledgers import rows
from tests.e2e.processes import Processes, wait_until
from tests.e2e.release_stack import (
    GAMEABLE,
    Talk,
    history,
    proxy_flags,
    release,
    stats,
    wait_for_arms,
    write_held_out,
)

pytestmark = pytest.mark.slow

GATED = """
[release]
mode = "gated"
canary_share = 0.5
baseline_share = 0.1
eval_dataset = "{rows}"
evaluate_every = 4
"""


def gated_flags(folder: Path, hook: str = PREFER_YES) -> list[str]:
    return proxy_flags(folder, GATED.format(rows=write_held_out(folder)), hook)


def test_a_version_that_learnt_is_released_and_answers_apps_also_after_a_restart(
    processes: Processes, tmp_path: Path
) -> None:
    flags = gated_flags(tmp_path)
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags)
    talk = Talk(proxy)
    record = talk.ask_until_decided(server, "released")
    assert (record["decided_by"], record["evidence"]["released"]) == ("gate", 0)
    assert record["evidence"]["low"] > -0.05
    version = record["version"]
    wait_until(lambda: stats(proxy)["release"]["released"] >= version, 20.0, "the release")
    wait_for_arms(proxy)
    talk.ask_until_answered_by_the_released_arm()
    query = "SELECT COUNT(*) FROM groups WHERE eval_id LIKE ? AND eval_version = ?"
    sampled = [rows(proxy, query, f"gate-{version}-%", one)[0][0] for one in (0, version)]
    assert sampled[0] == sampled[1] == record["evidence"]["draws"]
    query = "SELECT DISTINCT state FROM groups WHERE kind = 'eval' OR arm = 'released'"
    assert [row[0] for row in rows(proxy, query)] == ["served"]

    assert release(server.url, "hold")[0] == 0  # later versions are better still
    code, output = release(server.url, "status", "--json")
    released = json.loads(output)["released"]
    assert (code, released >= version) == (0, True)
    assert proxy.kill() == -signal.SIGKILL
    proxy = processes.proxy(server, *flags, folder="proxy")
    shown = stats(proxy)["release"]
    assert (shown["released"], shown["is_held"]) == (released, True)


def test_a_version_that_got_worse_is_rejected_and_training_goes_back(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *gated_flags(tmp_path, GAMEABLE))
    talk = Talk(proxy)
    record = talk.ask_until_decided(server, "rejected")
    assert record["decided_by"] == "gate"
    assert record["evidence"]["source"] == "held_out"
    assert record["evidence"]["high"] < -0.05
    assert record["evidence"]["restored"] == 0
    code, output = release(server.url, "status", "--json")
    state = json.loads(output)
    assert (code, state["released"], state["candidate"]) == (0, 0, None)
    assert record["version"] in state["rejected"]

    code, output = release(server.url, "promote", str(record["version"]))
    assert code == 2
    assert "was rejected" in output
    code, output = release(server.url, "hold")
    assert code == 0, output
    wait_until(lambda: stats(proxy)["release"]["is_held"], 20.0, "the hold")
    code, output = release(server.url, "history", "--json")
    assert json.loads(output) == history(server)
    assert history(server)[-1]["decided_by"] == "operator"
    code, output = release(server.url, "resume")
    assert code == 0, output
    talk.ask()
