"""The command `fakevllm eval` in front of a scripted proxy."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from fakevllm.cli.main import app
from fakevllm.errors import UserError
from fakevllm.evaluation.command import EvalSettings, run_eval
from fakevllm.evaluation.messages import (
    CHECK_PATH,
    END_PATH,
    ROW_PATH,
    RowReply,
    RowRequest,
    Sample,
)
from tests.proxy.scripted_swarm import TIMEOUT_S, ScriptedSwarm, until


def write_rows(folder: Path, num: int) -> Path:
    file = folder / "held_out.jsonl"
    file.write_text("".join(f'{{"question": "Row {n}?"}}\n' for n in range(num)))
    return file


@pytest.mark.parametrize(("low", "high"), [("0", "inf"), ("-inf", "1"), ("nan", "1"), ("1", "0")])
def test_a_reward_range_that_is_no_range_is_refused_in_one_line(
    tmp_path: Path, low: str, high: str
) -> None:
    flags = ["--dataset", str(write_rows(tmp_path, 1)), "--reward-range", low, high]
    done = CliRunner().invoke(app, ["eval", *flags])
    assert done.exit_code == 2
    assert "--reward-range needs two finite numbers, the smaller number first." in done.stderr
    assert len(done.stderr.splitlines()) == 1


class CollapsedProxy(ScriptedSwarm):
    """A proxy at which version 3 has no reward for any row."""

    def __init__(self) -> None:
        super().__init__()
        self.answers |= {CHECK_PATH: {"has_hooks": True, "trained": []}, END_PATH: {}}

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path != ROW_PATH:
            return response
        row = RowRequest.model_validate(await request.json())
        is_collapsed = row.version == 3
        sample = Sample(text="", reward=None if is_collapsed else 1.0, failure=None)
        reply = RowReply(
            group_id="g",
            first_version=row.version,
            last_version=row.version,
            greedy=sample,
            samples=[sample] * row.num_samples,
            reason="empty" if is_collapsed else None,
        )
        return web.json_response(reply.model_dump(mode="json"))


async def test_one_version_without_rewards_does_not_hide_the_others_and_fails_the_limit(
    tmp_path: Path,
) -> None:
    settings = EvalSettings(write_rows(tmp_path, 12), "question", "", num_samples=1)
    output = StringIO()
    console = Console(file=output, width=100)
    async with CollapsedProxy() as proxy:
        compared = replace(settings, url=proxy.url, versions=(0, 3), fail_below=0.5)
        assert not await asyncio.to_thread(run_eval, compared, console)
        only_first = replace(compared, versions=(0,))
        assert await asyncio.to_thread(run_eval, only_first, console)
        with pytest.raises(UserError, match=r"scored none of 10 rows .*: empty"):
            await asyncio.to_thread(run_eval, replace(compared, versions=(3,)), console)
    text = output.getvalue()
    assert (
        "12 rows have no reward with at least one version, and do not count there (empty)" in text
    )


class EditedProxy(ScriptedSwarm):
    """A proxy whose hooks change before the fourth row."""

    def __init__(self) -> None:
        super().__init__()
        self.answers |= {CHECK_PATH: {"has_hooks": True, "trained": []}, END_PATH: {}}

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path != ROW_PATH:
            return response
        sample = Sample(text="", reward=1.0, failure=None)
        reply = RowReply(
            group_id="g",
            first_version=0,
            last_version=0,
            greedy=sample,
            samples=[sample],
            reason=None,
            hook_hash="old" if self.calls[ROW_PATH] < 4 else "new",
        )
        return web.json_response(reply.model_dump(mode="json"))


async def test_a_change_of_the_hooks_during_the_rows_ends_the_command_in_one_line(
    tmp_path: Path,
) -> None:
    settings = EvalSettings(write_rows(tmp_path, 12), "question", "", num_samples=1)
    async with EditedProxy() as proxy:
        with pytest.raises(UserError, match=r"The hooks of the proxy changed .*: run the command"):
            await asyncio.to_thread(run_eval, replace(settings, url=proxy.url), Console())
        same = replace(settings, url=proxy.url, limit=3)
        proxy.calls.clear()
        assert await asyncio.to_thread(run_eval, same, Console(file=StringIO()))


class LoadingProxy(ScriptedSwarm):
    """A proxy that does not answer the check until the evaluation has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.answers[END_PATH] = {}
        self.has_ended = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path == CHECK_PATH:
            await self.has_ended.wait()
        if request.path == END_PATH:
            self.has_ended.set()
        return response


async def test_ctrl_c_while_versions_are_loaded_lets_the_proxy_unload_them(tmp_path: Path) -> None:
    file = write_rows(tmp_path, 1)
    async with LoadingProxy() as proxy:
        flags = ["--dataset", str(file), "--url", proxy.url, "--version", "0", "--version", "3"]
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fakevllm", "eval", *flags, cwd=tmp_path
        )
        try:
            await until(lambda: proxy.calls[CHECK_PATH] > 0)
            command.send_signal(signal.SIGINT)
            async with asyncio.timeout(TIMEOUT_S):
                assert await command.wait() == 130
            assert proxy.bodies[END_PATH] == {"versions": [0, 3]}
        finally:
            proxy.has_ended.set()
            if command.returncode is None:
                command.kill()
                await command.wait()
