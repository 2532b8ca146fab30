"""The capture of each format the engine is asked in, by its path."""

from __future__ import annotations

from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.chat import ChatCapture
from fakevllm_server.rollout.capture.completions import CompletionsCapture

CAPTURES: dict[str, type[CallCapture]] = {
    "/v1/chat/completions": ChatCapture,
    "/v1/completions": CompletionsCapture,
}
