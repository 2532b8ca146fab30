"""Groups keep the version of the hooks under which they began."""

from __future__ import annotations

from fakevllm.hooks.version_leases import Use, VersionLeases


def test_a_group_keeps_its_version_through_all_uses() -> None:
    leases = VersionLeases()
    assert leases.begin("g1", Use.REQUEST) == 0
    assert leases.switch() == []
    assert leases.begin("g1", Use.SIBLINGS) == leases.version_of("g1") == 0
    assert leases.begin("g2", Use.REQUEST) == leases.version_of(None) == leases.current == 1
    assert leases.end("g1", Use.REQUEST) == []
    assert leases.begin("g1", Use.FEEDBACK) == 0
    assert leases.end("g1", Use.SIBLINGS) == []
    assert leases.num_open == 2
    assert leases.end("g1", Use.FEEDBACK) == [0]
    assert leases.num_open == 1 and leases.version_of("g1") == 1


def test_a_use_that_ends_twice_does_not_end_another() -> None:
    leases = VersionLeases()
    leases.begin("g1", Use.FEEDBACK)
    leases.begin("g1", Use.CALL)
    leases.begin("g1", Use.CALL)
    leases.switch()
    for _ in range(2):
        assert leases.end("g1", Use.FEEDBACK) == []
    assert leases.end("g1", Use.CALL) == []
    assert leases.end("g1", Use.CALL) == [0]
    assert leases.end("g1", Use.CALL) == leases.end("unknown", Use.REQUEST) == []


def test_versions_end_in_any_order_and_the_current_one_stays() -> None:
    leases = VersionLeases()
    for version in range(3):
        leases.begin(f"g{version}", Use.REQUEST)
        assert leases.switch() == []
    assert leases.num_open == 4
    assert leases.end("g1", Use.REQUEST) == [1]
    assert leases.end("g0", Use.REQUEST) == [0]
    assert leases.switch() == [3]
    assert leases.end("g2", Use.REQUEST) == [2]
    assert (leases.current, leases.num_open) == (4, 1)
