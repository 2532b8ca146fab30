"""Engines behind the server. Heavy libraries live here and nowhere else; names resolve on first
use."""

from __future__ import annotations

BACKENDS = {
    "fake": "fakevllm_server.backends.fake",
    "embedded": "fakevllm_server.backends.embedded",
}
"""--backend NAME -> the module run as the engine's child process."""
