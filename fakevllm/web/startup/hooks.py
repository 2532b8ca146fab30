"""Start the process of the user's hooks."""

from __future__ import annotations

import contextlib

from fakevllm.config.model import Config
from fakevllm.errors import ConfigError
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.sandbox import HookSandbox
from fakevllm_adapters.privacy.in_use import RedactionInUse


async def start_hooks(
    config: Config, stack: contextlib.AsyncExitStack, redaction: RedactionInUse
) -> HookVersions | None:
    """Start the process of the user's hooks. Return None if the configuration names no hooks."""
    if config.hooks.path is None:
        if config.hooks.watch:
            raise ConfigError(
                "hooks.watch (--watch-hooks) needs hooks: set hooks.path (--hooks), or take it out."
            )
        return None
    worker = new_worker(config, redaction)
    try:
        await worker.start()
    except BaseException:
        await worker.close()
        raise
    versions = HookVersions(worker)
    stack.push_async_callback(versions.close)
    return versions


def new_worker(config: Config, redaction: RedactionInUse) -> HookWorker:
    """Return a process of the user's hooks that is not started yet."""
    assert config.hooks.path is not None, "only a proxy with hooks runs them"
    sandbox = HookSandbox(config.hooks.environment, config.hooks.memory_mb)
    return HookWorker(config.hooks.path, config.hooks.timeout_s, sandbox, redaction=redaction)
