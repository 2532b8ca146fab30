"""Exit codes of `fakevllm-server`: 2, with one line on stderr, for a user's mistake, and 130 for
Ctrl-C."""

from __future__ import annotations

from functools import partial

from fakevllm_runtime.commands import run_command

run_server_command = partial(run_command, program="fakevllm-server")
