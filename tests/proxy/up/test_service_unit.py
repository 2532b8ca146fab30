"""The unit of systemd agrees with the command that it runs."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

from typer.testing import CliRunner

from fakevllm.cli.main import app
from fakevllm.processes.restart_policy import BAD_SETTINGS_CODE
from fakevllm.up.programs import STOP_TIMEOUT_S

UNIT = Path(__file__).parents[3] / "deploy/fakevllm.service"


def test_the_unit_runs_a_command_that_exists_and_waits_for_its_end() -> None:
    unit = configparser.ConfigParser(delimiters="=", interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "fakevllm"
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
    assert float(service["TimeoutStopSec"]) > STOP_TIMEOUT_S
    assert service["KillMode"] == "mixed"  # SIGTERM to the command only, which stops the others
    assert int(service["RestartPreventExitStatus"]) == BAD_SETTINGS_CODE
