"""The plugin that vLLM loads in each of its processes. It imports no torch by itself."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path

from fakevllm_server.types.weight_transfer import JSON

IMPORT_PATH = Path(__file__).parent / "vllm_plugin"
"""Folder that must be on the import path of a vLLM that has the engine `fakevllm_json`."""


def register() -> None:
    """Register the weight transfer engine `fakevllm_json` with vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        JSON, "fakevllm_server.backends.weight_transfer.json_engine", "JsonWeightTransferEngine"
    )
