"""Limits on a hook process, which runs the user's hooks. The limits control its environment
variables, its memory and its process group.

Hooks do not see the proxy's secrets. Processes that a hook started are killed when the hook process
ends. The limits protect against mistakes. They do not protect against a malicious hook, because
hooks run as the same operating system user as the proxy.
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
    """Names of environment variables that hooks see, in addition to a default list."""
    memory_mb: int = 0
    """Maximum address space in MiB; 0 means no limit."""

    def allows(self, name: str) -> bool:
        """Return True if hooks see the environment variable `name`.

        >>> sandbox = HookSandbox(environment=("DATABASE_URL",))
        >>> [sandbox.allows(name) for name in ("PATH", "DATABASE_URL", "FAKEVLLM_SWARM_KEY")]
        [True, True, False]
        """
        return name in _ALLOWED or name in self.environment or name.startswith(_ALLOWED_PREFIXES)

    def enter(self) -> None:
        """Apply this sandbox's limits (environment variables, memory and process group) to the
        current process. The hook process calls this method before it runs any code of the user."""
        os.setpgid(0, 0)
        for name in [name for name in os.environ if not self.allows(name)]:
            del os.environ[name]
        if self.memory_mb:
            limit = self.memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


DEFAULT_SANDBOX = HookSandbox()


def kill_group(pid: int | None) -> None:
    """Kill the hook process `pid`, and all processes that hooks have started in its process group.
    Call this function before the hook process is reaped, because the operating system may reuse the
    process id after that."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
