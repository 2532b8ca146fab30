"""Reads the figures of an engine's queue and prefix cache from its Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass

_QUERIES = b"vllm:prefix_cache_queries_total"
_HITS = b"vllm:prefix_cache_hits_total"
_WAITING = b"vllm:num_requests_waiting"


@dataclass(frozen=True, slots=True)
class PrefixCacheHits:
    """How many tokens of prompts an engine found in its prefix cache since its start."""

    num_queried: int
    num_hit: int

    @property
    def share(self) -> float:
        """Share of the prompt tokens that were found; 0 before the first prompt."""
        return self.num_hit / self.num_queried if self.num_queried else 0.0


def parse_prefix_cache(page: bytes) -> PrefixCacheHits | None:
    r"""Return the figures on a page of metrics. Return None if the engine does not report them.

    >>> page = b'vllm:prefix_cache_queries_total{engine="0"} 8.0\n'
    >>> parse_prefix_cache(page + b'vllm:prefix_cache_hits_total{engine="0"} 6.0\n')
    PrefixCacheHits(num_queried=8, num_hit=6)
    """
    queries, hits = _sum(page, _QUERIES), _sum(page, _HITS)
    return None if queries is None or hits is None else PrefixCacheHits(queries, hits)


def parse_num_waiting(page: bytes) -> int | None:
    r"""Return the number of calls in the engine's queue on a page of metrics. Return None if the
    engine does not report it.

    >>> parse_num_waiting(b'vllm:num_requests_waiting{engine="0"} 2.0\n')
    2
    """
    return _sum(page, _WAITING)


def _sum(page: bytes, metric: bytes) -> int | None:
    try:
        values = [
            float(line.rpartition(b" ")[2])
            for line in page.split(b"\n")
            if line.startswith((metric + b" ", metric + b"{"))
        ]
        return int(sum(values)) if values else None
    except (ValueError, OverflowError):  # such as NaN
        return None
