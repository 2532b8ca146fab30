"""The plugin that vLLM loads in each of its processes. It imports no torch by itself."""

# pyright: reportMissingImports=false
from __future__ import annotations

from fakevllm_server.types.weight_transfer import JSON


def register() -> None:
    """Register the weight transfer engine `fakevllm_json` with vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        JSON, "fakevllm_server.backends.weight_transfer.json_engine", "JsonWeightTransferEngine"
    )
