"""The exceptions of the package fakevllm. The package has the proxy, its command line and the SDK.

FakevllmError
└── UserError        a mistake of the user; the message names the fix; a command exits with code 2
    ├── ConfigError  a mistake in a setting or flag, or in a file that a setting names
    ├── HookError    a mistake in the user's hook files
    └── LedgerError  a problem with the ledger file
"""

from __future__ import annotations

from fakevllm_runtime.errors import ConfigError as ConfigError
from fakevllm_runtime.errors import FakevllmError as FakevllmError
from fakevllm_runtime.errors import UserError as UserError


class HookError(UserError):
    pass


class LedgerError(UserError):
    pass
