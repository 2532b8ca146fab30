"""Exit codes of `fakevllm-server`. After a mistake of the user, the code is 2, and one line on
stderr reports the mistake. After Ctrl-C, the code is 130."""

from __future__ import annotations

from functools import partial

from fakevllm_runtime.commands import run_command

run_server_command = partial(run_command, program="fakevllm-server")
