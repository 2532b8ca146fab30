"""Weights from a trainer's process to vLLM without a folder, through vLLM's weight transfer routes.

The trainer's process sends, or one of verl's workers (`backends/verl/weight_sending.py`). vLLM's
worker processes receive, with a weight transfer engine of vLLM (`nccl`, `ipc`) or with this
project's `fakevllm_json`, which needs no GPU. The server pauses vLLM before, and resumes it
afterwards (`backends/vllm/weight_update.py`).

sender.py         the sending side, in the trainer's process
weight_source.py  the weights to send, by the names in a model folder
socket_client.py  vLLM's weight transfer routes over its Unix socket
json_engine.py    the receiving side of `fakevllm_json`, in vLLM's worker processes
plugin.py         registers `fakevllm_json` with vLLM
vllm_plugin/      a package without code, with the entry point that makes vLLM load the plugin.
                  Only a vLLM that the server starts has this folder on its import path.
"""

from __future__ import annotations

from pathlib import Path

PLUGIN_PATH = Path(__file__).parent / "vllm_plugin"
"""Folder that must be on the import path of a vLLM that has the engine `fakevllm_json`."""
