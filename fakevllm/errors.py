"""The proxy's exceptions.

FakevllmError
└── UserError        a user's mistake: the message says what to do; exit code 2
    ├── ConfigError  settings, flags, files named by them
    ├── HookError    the user's hook files
    └── LedgerError  the ledger file
"""

from __future__ import annotations


class FakevllmError(Exception):
    pass


class UserError(FakevllmError):
    pass


class ConfigError(UserError):
    pass


class HookError(UserError):
    pass


class LedgerError(UserError):
    pass
