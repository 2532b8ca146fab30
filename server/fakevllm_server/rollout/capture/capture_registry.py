"""The capture class for each path of the engine's API, such as /v1/chat/completions. A capture
records the tokens of one call for training."""

from __future__ import annotations

from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.rollout.capture.completion_tokens import CompletionsCapture

CAPTURES: dict[str, type[CallCapture]] = {
    "/v1/chat/completions": ChatCapture,
    "/v1/completions": CompletionsCapture,
}
"""Capture class by path. Calls at other paths are not captured."""
