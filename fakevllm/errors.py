"""The proxy's exceptions.

FakevllmError
└── UserError        a user's mistake: the message says what to do; exit code 2
    ├── ConfigError  settings, flags, files named by them
    ├── HookError    the user's hook files
    └── LedgerError  the ledger file
"""

from __future__ import annotations

from fakevllm_runtime.errors import ConfigError as ConfigError
from fakevllm_runtime.errors import FakevllmError as FakevllmError
from fakevllm_runtime.errors import UserError as UserError


class HookError(UserError):
    pass


class LedgerError(UserError):
    pass
