"""A forest of tokens. Each node of its trees is one token, and calls with a common prefix share the
nodes of this prefix. A call is one model call, which has a prompt and a response.

The trainer computes each node of the forest once, so it computes a common prefix only once. This
folder is pure Python. It does not import torch and does no I/O.
"""

from __future__ import annotations

from fakevllm_server.forest.packing import Piece, pack
from fakevllm_server.forest.token_edges import Edges
from fakevllm_server.forest.trie import CallTokens, Forest, Segment, build_forest

__all__ = ["CallTokens", "Edges", "Forest", "Piece", "Segment", "build_forest", "pack"]
