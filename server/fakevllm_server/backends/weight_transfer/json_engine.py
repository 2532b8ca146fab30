"""The receiving side of the weight transfer engine `fakevllm_json`, in vLLM's worker processes.

Each request to `/update_weights` has some weights as safetensors in base64. The engine is for
machines without a GPU. The weights are loaded as vLLM's own engines load them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class JsonInitInfo(WeightTransferInitInfo):
    """Nothing: the engine needs no connection of its own."""


@dataclass
class JsonUpdateInfo(WeightTransferUpdateInfo):
    """Some of the model's weights."""

    weights: str
    """The weights as safetensors, in base64."""


class JsonWeightTransferEngine(WeightTransferEngine[JsonInitInfo, JsonUpdateInfo]):
    init_info_cls = JsonInitInfo
    update_info_cls = JsonUpdateInfo

    def init_transfer_engine(self, init_info: JsonInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method also synchronizes an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: JsonUpdateInfo) -> None:
        self.model.load_weights(load(base64.b64decode(update_info.weights)).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        raise NotImplementedError("the module sender.py sends the weights")
