"""The exceptions of both programs.

FakevllmError
└── UserError        a user's mistake: the message says what to do; exit code 2
    └── ConfigError  settings, flags, and files that they name
"""

from __future__ import annotations


class FakevllmError(Exception):
    """Base class of the project's exceptions."""


class UserError(FakevllmError):
    """A mistake of the user, with a message that says what to do."""


class ConfigError(UserError):
    """A wrong setting or flag, or an unusable file that one of them names."""
