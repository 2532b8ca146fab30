"""Exit codes of `fakevllm-server`: 2 and one line for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

from functools import partial

from fakevllm_runtime.commands import run_command

run_server_command = partial(run_command, program="fakevllm-server")
