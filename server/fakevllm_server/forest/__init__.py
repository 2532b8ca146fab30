"""Calls arranged as a forest of tokens, so that the model computes a shared prefix only once.

The folder is pure Python. It does not import torch and does no I/O.
"""

from __future__ import annotations

from fakevllm_server.forest.packing import Piece, pack
from fakevllm_server.forest.token_edges import Edges
from fakevllm_server.forest.trie import CallTokens, Forest, Segment, build_forest

__all__ = ["CallTokens", "Edges", "Forest", "Piece", "Segment", "build_forest", "pack"]
