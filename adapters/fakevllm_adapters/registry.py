"""The wire formats the proxy speaks."""

from __future__ import annotations

from fakevllm_adapters.base import Adapter
from fakevllm_adapters.chat import ChatAdapter

ADAPTERS: dict[str, Adapter] = {"chat": ChatAdapter()}
