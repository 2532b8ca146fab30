from __future__ import annotations

import random

import pytest
import torch

from fakevllm_server.backends.embedded.decode.kv_cache import (
    CachedPrefix,
    CacheShape,
    KvCache,
    SharedPrefix,
    joined,
)

SHAPE = CacheShape(
    num_layers=2,
    num_heads=1,
    key_dim=3,
    value_dim=2,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def make_cache(max_rows: int = 16, max_length: int = 4096, max_cells: int = 1 << 30) -> KvCache:
    return KvCache(SHAPE, max_rows, max_length, max_cells)


def prefix_of(value: float, length: int) -> CachedPrefix:
    """Return a prefix whose position t holds value + t / 1000 in all layers and heads."""
    marks = value + torch.arange(length) / 1000
    size = (SHAPE.num_layers, SHAPE.num_heads, length)
    return CachedPrefix(
        marks[:, None].expand(*size, 3).clone(), -marks[:, None].expand(*size, 2).clone()
    )


def in_parts(prefix: CachedPrefix, rng: random.Random) -> list[CachedPrefix]:
    """Cut a prefix into two parts at random. Parts may be empty."""
    cut = rng.randint(0, prefix.num_tokens)
    return [prefix.part(0, cut), prefix.part(cut, prefix.num_tokens)]


def append(cache: KvCache, lengths: list[int], values: list[float]) -> None:
    """Append one position to every row, as a decode iteration does."""
    cache.begin(lengths)
    marks = torch.tensor([v + n / 1000 for v, n in zip(values, lengths, strict=True)])
    for layer in range(SHAPE.num_layers):
        cache.update(
            marks[:, None, None, None].expand(-1, 1, 1, 3),
            -marks[:, None, None, None].expand(-1, 1, 1, 2),
            layer,
        )


@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_their_tokens_while_others_join_grow_and_leave(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache()
    values: list[float] = []
    lengths: list[int] = []
    for turn in range(40):
        if len(values) < 16 and rng.random() < 0.5:
            values.append(float(turn))
            lengths.append(rng.choice([rng.randrange(0, 40), rng.randrange(200, 300)]))
            cache.add_row(*in_parts(prefix_of(values[-1], lengths[-1]), rng))
        # Rows also join and leave one after another, without a forward pass in between.
        if values and rng.random() < 0.5:
            append(cache, lengths, values)
            lengths = [length + 1 for length in lengths]
        if values and rng.random() < 0.2:
            row = rng.randrange(len(values))
            cache.drop_row(row)
            values[row], lengths[row] = values[-1], lengths[-1]
            values.pop()
            lengths.pop()
        for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
            expected = prefix_of(value, length)
            torch.testing.assert_close(cache.keys[:, row, :, :length], expected.keys)
            torch.testing.assert_close(cache.values[:, row, :, :length], expected.values)


def test_a_row_attends_only_to_its_own_tokens() -> None:
    cache = make_cache()
    for _ in range(2):
        cache.add_row()

    cache.begin([0, 5])

    visible = cache.mask()[:, 0, 0] == 0
    assert visible.sum(-1).tolist() == [1, 6]
    assert visible[1, :6].all()


def test_unused_cache_positions_hold_no_nan() -> None:
    cache = make_cache()
    cache.add_row()
    cache.begin([300])

    assert torch.isfinite(cache.keys).all() and torch.isfinite(cache.values).all()


def test_many_long_rows_do_not_fit_but_one_always_does() -> None:
    cache = make_cache(max_rows=64, max_cells=8 * 512)

    assert cache.fits(8, 512)
    assert not cache.fits(9, 512)
    assert not cache.fits(8, 513)
    assert cache.fits(1, 4096)


def test_the_memory_of_a_long_row_is_freed_when_it_leaves() -> None:
    cache = make_cache()
    cache.add_row(prefix_of(1.0, 3000))
    assert cache.keys.shape[3] >= 3000
    assert cache.keys.shape[1] == 1, "a long row alone gets no empty neighbours"

    cache.drop_row(0)

    assert cache.keys.numel() == 0


def test_a_copy_of_a_row_with_a_shared_prefix_has_both_parts() -> None:
    cache = make_cache()
    shared = SharedPrefix(b"key", prefix_of(1.0, 20))
    for value in (2.0, 3.0):
        cache.add_row(prefix_of(value, 5), shared=shared)
    cache.add_row(prefix_of(4.0, 7))
    cache.begin([25, 25, 7])

    cache.drop_row(0)

    whole = cache.copy_of(1, 0, 25)
    expected = joined([prefix_of(1.0, 20), prefix_of(3.0, 5)])
    for begin, end in ((0, 25), (3, 12), (15, 22), (21, 25)):
        part, copied = expected.part(begin, end), cache.copy_of(1, begin, end)
        torch.testing.assert_close(copied.keys, part.keys)
        torch.testing.assert_close(copied.values, part.values)
    assert whole.num_tokens == 25 and cache.shared_prefix(b"key") is shared
    cache.drop_row(1)
    assert cache.shared_prefix(b"key") is None and cache.shared_rows == []
