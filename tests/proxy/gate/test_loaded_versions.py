"""Which versions of the weights no evaluation needs any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.gate.loaded_versions import LoadedVersions

uses = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300)), max_size=12)


def test_a_version_in_use_is_never_idle() -> None:
    versions = LoadedVersions(idle_s=10.0)
    versions.begin([3, 4])
    versions.begin([3])
    versions.end([3, 4], 100.0)
    assert versions.take_idle(1000.0) == [4]
    versions.end([3], 2000.0)
    assert versions.take_idle(2009.0) == []
    assert versions.take_idle(2010.0) == [3]


def test_a_version_that_was_unloaded_is_not_unloaded_again() -> None:
    versions = LoadedVersions(idle_s=10.0)
    versions.begin([3])
    versions.end([3], 100.0)
    versions.forget(3)
    assert versions.take_idle(1000.0) == []


@given(uses)
def test_each_version_is_idle_once_and_not_before_its_time(
    uses: list[tuple[int, int, int]],
) -> None:
    versions = LoadedVersions(idle_s=100.0)
    last_used: dict[int, int] = {}
    now_s = 0
    for version, pause_s, duration_s in uses:
        now_s += pause_s
        for idle in versions.take_idle(now_s):
            assert now_s - last_used.pop(idle) >= 100.0
        versions.begin([version])
        now_s += duration_s
        versions.end([version], now_s)
        last_used[version] = now_s
    assert set(versions.take_idle(now_s + 100.0)) == set(last_used)
    assert versions.take_idle(now_s + 1e6) == []
