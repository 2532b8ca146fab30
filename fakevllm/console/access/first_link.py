"""Keep the first login link valid while the engine starts.

`fakevllm up` starts the console together with the server, and says that it is ready when the engine
answers. A large engine needs longer than a link's lifetime. Therefore the lifetime of the link that
the console prints at its start begins when the proxy is ready.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

from fakevllm.console.access.login_link import LoginLink
from fakevllm.runtime.admin_client import proxy_root
from fakevllm_runtime.engines import REQUIRED_MODULES, boot_timeout_s

POLL_EVERY_S = 2.0
TIMEOUT_S = 5.0
MAX_START_S = boot_timeout_s(REQUIRED_MODULES)
"""Maximum number of seconds for which the link is kept. No engine may take longer to start."""
_NOT_READY = 503
"""HTTP status of the proxy's route /health while no engine answers."""


async def keep_first_link(
    link: LoginLink,
    is_starting: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    poll_every_s: float = POLL_EVERY_S,
) -> None:
    """Prolong the first link until the proxy is ready, but at most for MAX_START_S seconds.
    `is_starting` returns True while the proxy is not ready. It may block for some seconds."""
    last = clock() + MAX_START_S
    while clock() < last and await asyncio.to_thread(is_starting):
        link.prolong_first(clock())
        await asyncio.sleep(poll_every_s)


def proxy_is_starting(url: str) -> bool:
    """Return True if the proxy at `url` runs or is being started, and no engine answers yet. Return
    False if the proxy is ready, and if no proxy listens at `url`."""
    try:
        with urllib.request.urlopen(f"{proxy_root(url)}/health", timeout=TIMEOUT_S):
            return False
    except urllib.error.HTTPError as error:
        with error:
            return error.code == _NOT_READY
    except (OSError, ValueError, HTTPException) as error:
        # `fakevllm up` opens the proxy's socket before the proxy runs, and keeps it open while the
        # proxy is restarted.
        reason = getattr(error, "reason", error)
        return isinstance(reason, (TimeoutError, ConnectionResetError))
