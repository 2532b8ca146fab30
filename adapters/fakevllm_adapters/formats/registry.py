"""The table of all API formats, with the adapter (format translator) of each."""

from __future__ import annotations

from fakevllm_adapters.formats.base import Adapter
from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.completions import CompletionsAdapter
from fakevllm_adapters.formats.messages.adapter import CountTokensAdapter, MessagesAdapter
from fakevllm_adapters.formats.responses.adapter import ResponsesAdapter

ADAPTERS: dict[str, Adapter] = {
    "chat": ChatAdapter(),
    "completions": CompletionsAdapter(),
    "responses": ResponsesAdapter(),
    "messages": MessagesAdapter(),
}

TOKEN_COUNTERS: dict[str, Adapter] = {"count_tokens": CountTokensAdapter()}
"""Formats that only count tokens. The server translates such requests; the proxy relays them."""
