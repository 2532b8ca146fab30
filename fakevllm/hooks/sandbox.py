"""Limits on a hook process: the environment variables that it sees, its memory, and its process
group.

The limits hide the proxy's secrets from hooks. They also make sure that a process started by a hook
ends with the hook process. The limits are no protection against hooks that are written to attack
the proxy, because hooks run as the same user as the proxy.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass

_ALLOWED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE"),
        *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "FAKEVLLM_JUDGE_")


@dataclass(frozen=True, slots=True)
class HookSandbox:
    """The environment variables and the memory that a hook process may use."""

    environment: tuple[str, ...] = ()
    """Names of further environment variables that hooks see."""
    memory_mb: int = 0
    """Maximum address space in MiB; 0 means no limit."""

    def allows(self, name: str) -> bool:
        """Return whether hooks see the environment variable `name`.

        >>> sandbox = HookSandbox(environment=("DATABASE_URL",))
        >>> [sandbox.allows(name) for name in ("PATH", "DATABASE_URL", "FAKEVLLM_SWARM_KEY")]
        [True, True, False]
        """
        return name in _ALLOWED or name in self.environment or name.startswith(_ALLOWED_PREFIXES)

    def enter(self) -> None:
        """Apply the limits to the current process, before any code of the user runs."""
        os.setpgid(0, 0)
        for name in [name for name in os.environ if not self.allows(name)]:
            del os.environ[name]
        if self.memory_mb:
            limit = self.memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


DEFAULT_SANDBOX = HookSandbox()


def kill_group(pid: int | None) -> None:
    """Kill the hook process `pid` and all processes that its hooks have started.

    Call this function before the process is reaped, because the system may use the id again
    afterwards.
    """
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
