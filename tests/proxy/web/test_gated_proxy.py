"""A proxy with the mode `gated`, in front of a scripted server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.status_rows import status_rows
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm_adapters.protocol.releases import ReleasesReply
from fakevllm_adapters.protocol.swarm import LoadPolicyReply
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ScriptedSwarm, until

HISTORY = ReleasesReply(records=[], released=7, candidate=None, rejected=[], is_held=True)
ONE_SET = LoadPolicyReply(
    success=False,
    failure_reason="The engine holds one set of weights, so only the version that it serves, 9, "
    "can be sampled.",
)


@asynccontextmanager
async def gated(
    folder: Path, swarm: ScriptedSwarm, rows: str = '{"question": "A held-out row?"}\n'
) -> AsyncGenerator[ProxyComponents]:
    held_out = folder / "held_out.jsonl"
    held_out.write_text(rows)
    flags: dict[str, dict[str, Any]] = {
        "proxy": {"run_dir": folder / "run"},
        "hooks": {"path": write_hooks(folder / "hooks", PREFER_YES)},
        "swarm": {"url": swarm.url},
        "release": {"mode": "gated", "eval_dataset": held_out},
    }
    async with open_proxy(load(None, flags)) as proxy:
        yield proxy


async def stats(proxy: ProxyComponents) -> dict[str, Any]:
    transport = httpx.ASGITransport(create_app(proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        return (await client.get("/fakevllm/stats")).json()


async def test_the_released_version_is_known_when_the_proxy_has_started(tmp_path: Path) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/releases"] = HISTORY
        swarm.answers["/load_policy"] = LoadPolicyReply(success=True, model="policy-7")
        async with gated(tmp_path, swarm) as proxy:
            assert proxy.gate is not None
            assert proxy.gate.view().released == 7
            shown = await stats(proxy)
    assert shown["release"] == {
        "released": 7,
        "candidate": None,
        "is_held": True,
        "evaluation": {},
        "next_candidate": None,
        "trouble": shown["release"]["trouble"],
        "has_released_arm": True,
    }
    rows = dict(status_rows(shown))
    assert rows["released"] == "version 7; releases are on hold"


async def test_with_an_engine_that_holds_one_set_of_weights_one_line_says_that_it_cannot_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/releases"] = HISTORY
        swarm.answers["/load_policy"] = ONE_SET
        async with gated(tmp_path, swarm) as proxy:
            gate = proxy.gate
            assert gate is not None
            await until(lambda: "one set of weights" in (gate.view().trouble or ""))
            await until(lambda: swarm.calls["/get_engine_status"] > 3)
    lines = [line.getMessage() for line in caplog.records if "one set" in line.getMessage()]
    assert len(lines) == 1
    assert 'set release.evaluation to "between_steps"' in lines[0]
    assert swarm.calls["/release"] == 0


async def test_a_server_that_does_not_know_releases_is_named_in_the_status(tmp_path: Path) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/releases"] = 404
        async with gated(tmp_path, swarm) as proxy:
            gate = proxy.gate
            assert gate is not None
            await until(lambda: "update fakevllm-server" in (gate.view().trouble or ""))


async def test_held_out_rows_that_were_trained_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger.open(tmp_path / "run" / "ledger.sqlite")
    ledger.record(replace(group("g1", state="trained"), question="a held-out  ROW?"))
    assert ledger.drain()
    ledger.close()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/releases"] = HISTORY
        swarm.answers["/load_policy"] = LoadPolicyReply(success=True, model="policy-7")
        async with gated(tmp_path, swarm) as proxy:
            gate = proxy.gate
            assert gate is not None
            await until(lambda: "was trained" in (gate.view().trouble or ""))
            shown = dict(status_rows(await stats(proxy)))
    assert shown["release gate"].startswith("1 row of ")
    assert "(the first: 'A held-out row?')" in shown["release gate"]
    (line,) = [line for line in caplog.messages if "was trained" in line]
    assert "take them out of the file, or name another file, and restart the proxy" in line


async def test_a_group_that_was_not_sent_before_its_row_was_held_out_does_not_stop_the_gate(
    tmp_path: Path,
) -> None:
    ledger = Ledger.open(tmp_path / "run" / "ledger.sqlite")
    ledger.record(replace(group("g1", state="trained"), question="A row that was trained?"))
    ledger.record(replace(group("g2", state="scored"), question="A row that waits?"))
    assert ledger.drain()
    ledger.close()
    rows = '{"question": "A row that waits?"}\n{"question": "A row that was trained?"}\n'
    async with ScriptedSwarm() as swarm:
        swarm.answers["/releases"] = HISTORY
        swarm.answers["/load_policy"] = LoadPolicyReply(success=True, model="policy-7")
        async with gated(tmp_path, swarm, rows) as proxy:
            gate = proxy.gate
            assert gate is not None
            await until(lambda: "was trained" in (gate.view().trouble or ""))
            trouble = gate.view().trouble
    assert trouble is not None and "(the first: 'A row that was trained?')" in trouble


async def test_a_held_out_file_without_rows_is_refused_at_the_start(tmp_path: Path) -> None:
    async with ScriptedSwarm() as swarm:
        with pytest.raises(ConfigError, match=r"has no rows: write one JSON object per line"):
            async with gated(tmp_path, swarm, rows=""):
                pass


async def test_without_hooks_the_mode_gated_is_refused_at_the_start(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "A held-out row?"}\n')
    flags: dict[str, dict[str, Any]] = {
        "proxy": {"run_dir": tmp_path / "run"},
        "release": {"mode": "gated", "eval_dataset": held_out},
    }
    with pytest.raises(ConfigError, match=r'"gated" needs hooks.*set hooks.path'):
        async with open_proxy(load(None, flags)):
            pass


async def test_in_the_continuous_mode_there_is_no_gate(tmp_path: Path) -> None:
    async with ScriptedSwarm() as swarm:
        flags: dict[str, dict[str, Any]] = {
            "proxy": {"run_dir": tmp_path / "run"},
            "swarm": {"url": swarm.url},
        }
        async with open_proxy(load(None, flags)) as proxy:
            assert proxy.gate is None
            assert (await stats(proxy))["release"] is None
        assert swarm.calls["/releases"] == 0
