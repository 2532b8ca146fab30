"""Send the weights of a model that FSDP has divided among workers to a vLLM, without a folder.

The workers gather one weight after the other. One of them sends the weights in chunks. The others
take part in the gathering only. No worker has more than one chunk and one weight in memory.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor
from torch.distributed.distributed_c10d import (
    _set_pg_timeout,  # pyright: ignore[reportPrivateUsage] - torch has no public function for it
)

from fakevllm_server.backends.verl.weight_export import FolderWeights, gather
from fakevllm_server.backends.weight_transfer.weight_source import WeightMetadata, WeightSource
from fakevllm_server.types.backend import BackendError


class GatheredWeights:
    """The full weights of a divided model, for one iteration. The class implements WeightSource.

    All workers must read the same number of weights. Otherwise, the workers that read more would
    wait for the others.
    """

    def __init__(self, weights: FolderWeights) -> None:
        self._weights = weights
        self._iteration = self._gather_all()
        self._has_gathered_all = False
        self._failure: Exception | None = None

    def metadata(self) -> list[WeightMetadata]:
        return [
            WeightMetadata(name, tensor.dtype, tuple(tensor.shape))
            for parts in self._weights.parts.values()
            for name, tensor in parts
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._iteration

    def gather_rest(self) -> None:
        """Gather the weights that have not been read, and discard them. If a gathering has failed
        on this worker, raise its error, because the worker does not know where the others are."""
        for _ in self._iteration:
            pass
        if self._failure is not None:
            raise self._failure
        if not self._has_gathered_all:
            raise RuntimeError("the weights were not gathered to the end")

    def _gather_all(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name in self._weights:
                yield from self._weights.split(name, gather(self._weights.read(name)))
        # Kept, because the code that sends may hide it behind an error of its own.
        except Exception as error:
            self._failure = error
            raise
        self._has_gathered_all = True


def send_together(
    weights: GatheredWeights, send: Callable[[WeightSource], None] | None
) -> str | None:
    """Gather all weights, and send them. All workers must call this function together. `send` is
    None on all workers but the one that sends.

    Return why sending failed, or None. After a failure, the worker that sends still gathers the
    rest, so that no other worker waits for it. Raise an error only if a gathering failed.
    """
    failure: str | None = None
    if send is not None:
        try:
            send(weights)
        # Isolated: the other workers go on to gather weights, and wait for this worker.
        except Exception as error:
            failure = _describe(error)
    weights.gather_rest()
    return failure


@contextmanager
def changed_timeout(timeout_s: float, *, usual_s: float) -> Generator[None]:
    """Let a worker wait for another one for at most `timeout_s` seconds within the `with` block,
    and for `usual_s` seconds afterwards. All workers must call this function together."""
    _set_pg_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        _set_pg_timeout(timedelta(seconds=usual_s))


def _describe(error: Exception) -> str:
    if isinstance(error, BackendError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
