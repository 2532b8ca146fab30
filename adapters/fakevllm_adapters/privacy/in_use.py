"""The redaction settings that a running process (proxy or server) uses."""

from __future__ import annotations

from fakevllm_adapters.privacy.redactor import Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings


class RedactionInUse:
    """The combined redaction settings of a proxy and its server. The proxy and the server each
    redact everything that the settings of either process name.

    A proxy gets the settings of its server with the server's status. A server gets the settings of
    a proxy with the job.
    """

    def __init__(self, own: PrivacySettings, other: PrivacySettings | None = None) -> None:
        self._own = own
        self.is_complete = True
        """Whether this process can use all settings of the other process. If not, it must store no
        texts."""
        self.set_other(other or PrivacySettings())

    def set_other(self, other: PrivacySettings, *, is_complete: bool = True) -> None:
        """Set the redaction settings of the other process (server or proxy), which apply together
        with this process's own settings. If this process cannot use all settings of the other
        process, `other` contains only the usable ones, and `is_complete` is False."""
        self.is_complete = is_complete
        self.settings = self._own.union(other)
        """The settings of both processes together."""
        self.redactor: Redactor = self.settings.redactor
        """The redactor with these settings."""
