"""Exit codes of `fakevllm-server`. The code is 2 after a user's mistake, which is reported in one
line on stderr. It is 130 after Ctrl-C."""

from __future__ import annotations

from functools import partial

from fakevllm_runtime.commands import run_command

run_server_command = partial(run_command, program="fakevllm-server")
