"""The exceptions that the proxy and the swarm server share.

FakevllmError
└── UserError        a mistake of the user; the program exits with code 2
    └── ConfigError  a wrong setting or flag, or an unusable file
"""

from __future__ import annotations


class FakevllmError(Exception):
    """Base class of the project's exceptions."""


class UserError(FakevllmError):
    """Error for a mistake of the user. The message says what the user must do."""


class ConfigError(UserError):
    """Error for a wrong setting or flag, or for an unusable file that a setting or flag names."""
