"""The demo ends at once if the engine cannot start or train, and shows only known values."""

from __future__ import annotations

import re
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.demo.command import probe_once, run_demo, shown
from fakevllm.demo.plot import points_of
from fakevllm.demo.run_state import DemoSettings, Run, ready
from fakevllm.demo.view import Snapshot
from fakevllm.errors import FakevllmError, UserError
from fakevllm.processes.output import LogFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess
from fakevllm.runtime.local_engines import ENGINE_PAIRS, EngineChoice
from fakevllm.web.routes.admin import Stats, StepStats
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply
from fakevllm_server.backends.process import child_process, engine_registry
from fakevllm_server.backends.vllm import rollout
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm

FAKE = EngineChoice.resolve("fake")


def run_at(url: str, folder: Path) -> Run:
    settings = DemoSettings(2, 0, "none", folder, None, FAKE)
    with socket.socket() as listener:
        idle = SupervisedProcess("nobody", "nothing", [], LogFile(folder / "log"), listener)
    return Run(settings, folder, idle, idle, url, url)


def stats(engine: EngineStatusReply, *curve: StepStats) -> Stats:
    return Stats(engine=engine, counts={}, curve=list(curve), sampled_tokens=0, lookups={})


async def test_an_engine_that_stays_offline_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    refused = EngineStatusReply(engine_status=EngineStatus.OFFLINE, engine_status_detail="no GPU")
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/stats"] = stats(refused)
        with pytest.raises(FakevllmError, match="did not start: no GPU"):
            await ready(run_at(proxy.url, tmp_path))


def test_a_run_that_stopped_training_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    def at(step: int, detail: str | None) -> Run:
        run = run_at("http://nowhere", tmp_path)
        run.stats = stats(
            EngineStatusReply(
                engine_status=EngineStatus.ROLLING, engine_status_detail=detail, global_step=step
            )
        )
        return run

    assert at(2, None).wants_more and not at(3, None).wants_more
    assert not at(3, "training stopped at step 2").wants_more
    with pytest.raises(FakevllmError, match="training stopped at step 1"):
        _ = at(2, "training stopped at step 1").wants_more


async def test_an_engine_that_takes_too_long_ends_the_demo_with_a_line(tmp_path: Path) -> None:
    booting = EngineStatusReply(engine_status=EngineStatus.BOOTING, engine_status_detail="loading")
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/stats"] = stats(booting)
        with pytest.raises(FakevllmError, match="not ready within 1 s: loading"):
            await ready(run_at(proxy.url, tmp_path), timeout_s=0.6)


async def test_a_step_without_a_scored_answer_is_left_out_of_the_view(tmp_path: Path) -> None:
    unknown, best = (
        StepStats(step=step, groups=1, policy_mean=0.5, returned_best=value, without_signal=0)
        for step, value in ((1, None), (2, 1.0))
    )
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/stats"] = stats(ROLLING, unknown, best)
        run = run_at(proxy.url, tmp_path)
        assert await ready(run) == "fake"
    assert run.snapshot().returned_best == [1.0]


def test_a_curve_has_a_point_for_each_step_with_a_value() -> None:
    assert points_of([0.5, None, 1.0]) == ([1, 3], [0.5, 1.0])


async def test_a_probe_the_model_refuses_ends_the_demo_with_a_line(tmp_path: Path) -> None:
    async with ScriptedSwarm() as server:
        server.answers["/v1/chat/completions"] = 400
        with pytest.raises(FakevllmError, match="The probe before training failed"):
            await probe_once(run_at(server.url, tmp_path), "fake", "before")
    assert not (tmp_path / "probe_before.json").exists()


async def test_the_output_after_the_live_display_starts_on_a_new_line() -> None:
    written = StringIO()
    console = Console(file=written, width=100, force_terminal=True)
    async with shown(console, lambda: Snapshot("training", 2, 3)):
        pass
    console.print("Right answers")
    assert "╯\nRight answers" in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", written.getvalue())


async def test_without_a_terminal_phases_and_steps_are_printed_as_lines() -> None:
    written = StringIO()
    console = Console(file=written, width=100, force_terminal=False)
    async with shown(console, lambda: Snapshot("training", 2, 3)):
        pass
    assert written.getvalue() == "training\nstep 1 of 3\n"


def test_the_run_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    make_run_folder(tmp_path / "run", "--run-dir")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    make_run_folder(tmp_path / "run", "--run-dir")  # a run that is resumed
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="name another --run-dir"):
        make_run_folder(tmp_path / "file", "--run-dir")


def test_a_control_run_cannot_be_resumed_as_training(tmp_path: Path) -> None:
    (tmp_path / "fakevllm.toml").write_text('[job]\ncontrol = "frozen"\n')
    with pytest.raises(UserError, match="is a run with --control frozen: resume it"):
        run_demo(DemoSettings(2, 0, "none", tmp_path, None, FAKE))


def test_the_demo_offers_the_servers_pairs_of_engines() -> None:
    assert ENGINE_PAIRS == engine_registry.PAIRS


@pytest.mark.parametrize("backend", ENGINE_PAIRS)
def test_the_demo_waits_longer_for_the_engines_than_the_server_does(backend: str) -> None:
    limits = {"vllm": rollout.VLLM_BOOT_TIMEOUT_S}
    engines = EngineChoice.resolve(backend)
    server_limit_s = sum(limits.get(name, child_process.BOOT_TIMEOUT_S) for name in engines.names)
    assert server_limit_s < engines.ready_timeout_s < server_limit_s + 120


@pytest.mark.parametrize(
    ("names", "expected", "title"),
    [
        (("embedded", None, None), ("embedded", "embedded"), "embedded samples and trains"),
        (("embedded", "vllm", None), ("vllm", "embedded"), "vllm samples, embedded trains"),
        (("vllm", None, "verl"), ("vllm", "verl"), "vllm samples, verl trains"),
        (("verl", "embedded", None), ("embedded", "verl"), "embedded samples, verl trains"),
    ],
)
def test_engines_are_chosen_as_by_the_server(
    names: tuple[str, str | None, str | None], expected: tuple[str, str], title: str
) -> None:
    engines = EngineChoice.resolve(*names)
    assert (engines.rollout, engines.trainer) == expected
    assert engines.title == title
    again = dict(zip(engines.flags[::2], engines.flags[1::2], strict=True))
    backend = again.get("--backend", "embedded")
    assert EngineChoice.resolve(backend, again.get("--rollout"), again.get("--trainer")) == engines


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nonesuch", None, None), "--backend must be one of embedded, fake, verl, vllm"),
        (("vllm", "verl", None), "--rollout must be one of embedded, fake, vllm, got 'verl'"),
        (("vllm", None, "vllm"), "--trainer must be one of embedded, fake, verl, got 'vllm'"),
        (("fake", "vllm", None), "shares no tokens"),
    ],
)
def test_an_impossible_choice_of_engines_is_one_error_line(
    names: tuple[str, str | None, str | None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EngineChoice.resolve(*names)


@pytest.mark.parametrize(
    ("backend", "installed", "message"),
    [
        ("embedded", (), r"embedded engine needs torch and transformers, .*'\.\[embedded\]'"),
        ("vllm", ("torch",), r"vllm engine needs vllm, .*'\.\[vllm\]'.*make_environment\.sh"),
        ("verl", ("vllm", "ray"), r"verl engine needs verl, .*'\.\[verl\]'.*make_environment\.sh"),
    ],
)
def test_a_missing_package_is_reported_before_anything_starts(
    backend: str, installed: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EngineChoice.resolve(backend).check_installed(installed.__contains__)
    EngineChoice.resolve("fake").check_installed(installed.__contains__)


def test_a_run_cannot_be_resumed_with_other_engines(tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text('{"rollout": "vllm", "trainer": "verl"}')
    with pytest.raises(UserError, match="vllm samples, verl trains: resume it with --backend verl"):
        run_demo(DemoSettings(2, 0, "none", tmp_path, None, FAKE))


def test_arguments_for_the_trainer_need_a_trainer_of_its_own(tmp_path: Path) -> None:
    settings = DemoSettings(2, 0, "none", tmp_path, None, trainer_args=("--num-workers=2",))
    with pytest.raises(UserError, match="--trainer-arg is for a trainer in a process of its own"):
        run_demo(settings)
    assert not list(tmp_path.iterdir())


def test_async_steps_and_lockstep_get_one_line(tmp_path: Path) -> None:
    settings = DemoSettings(2, 0, "none", tmp_path, None, lockstep=True, async_steps=1)
    with pytest.raises(UserError, match="--async-steps does not go with --lockstep: take one"):
        run_demo(settings)
    assert not list(tmp_path.iterdir())


def test_the_server_of_the_demo_gets_the_arguments_for_the_trainer(tmp_path: Path) -> None:
    verl = EngineChoice.resolve("verl")
    settings = DemoSettings(2, 0, "none", tmp_path, None, verl, trainer_args=("--num-workers=2",))
    assert settings.engine_flags == ["--backend", "verl", "--trainer-arg=--num-workers=2"]


async def test_the_view_names_the_engines_that_are_starting(tmp_path: Path) -> None:
    booting = EngineStatusReply(engine_status=EngineStatus.BOOTING)
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/stats"] = stats(booting)
        run = run_at(proxy.url, tmp_path)
        with pytest.raises(FakevllmError):
            await ready(run, timeout_s=0.1)
    assert run.snapshot().phase == "starting (fake samples and trains): 0 s"
