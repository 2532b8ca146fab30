"""The redaction that a running process uses."""

from __future__ import annotations

from fakevllm_adapters.privacy.redactor import Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings


class RedactionInUse:
    """The process's own settings for redaction, together with those of the other process. Whatever
    one of the two redacts is redacted.

    A proxy gets the settings of its server with the server's status. A server gets the settings of
    a proxy with the job.
    """

    def __init__(self, own: PrivacySettings, other: PrivacySettings | None = None) -> None:
        self._own = own
        self.set_other(other or PrivacySettings())

    def set_other(self, other: PrivacySettings) -> None:
        """Use these settings of the other process, together with the own settings."""
        self.settings = self._own.union(other)
        """The settings of both processes together."""
        self.redactor: Redactor = self.settings.redactor
        """The redactor with these settings."""
