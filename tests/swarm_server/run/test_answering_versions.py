"""The checkpoints of versions that answer apps are kept while proxies request them."""

from __future__ import annotations

from fakevllm_server.run.answering_versions import KEPT_S, AnsweringVersions


def test_a_version_is_kept_until_no_proxy_has_requested_it_for_ten_minutes() -> None:
    now = 0.0
    answering = AnsweringVersions(lambda: now)
    answering.requested(3)
    answering.requested(7)
    now = KEPT_S - 1
    answering.requested(3)
    assert answering.versions() == {3, 7}
    now = KEPT_S
    assert answering.versions() == {3}


def test_a_version_that_a_proxy_unloads_is_not_kept() -> None:
    answering = AnsweringVersions()
    answering.requested(3)
    answering.unloaded(3)
    answering.unloaded(5)
    assert answering.versions() == set()
