"""Who takes part, and when all agree."""

from __future__ import annotations

from fakevllm_server.clients import IDLE_LIMIT_S, ActiveClients


def test_one_client_that_agrees_is_any_and_not_all() -> None:
    clients = ActiveClients()
    assert not clients.any_agreed and not clients.all_agreed
    clients.entered("a", 0.0)
    clients.entered("b", 0.0)
    assert clients.agree("a", 1.0) is None
    assert clients.any_agreed and not clients.all_agreed
    assert clients.agree("b", 1.0) is None
    assert clients.all_agreed


def test_a_client_that_has_ended_nothing_has_no_say() -> None:
    clients = ActiveClients()
    clients.seen("a", 0.0)
    refusal = clients.agree("a", 1.0)
    assert refusal is not None and refusal.startswith(
        "Client a is not in the active list -- it must"
    )
    assert clients.agree("", 1.0) == "client_uuid required"
    assert not clients.any_agreed


def test_a_client_that_is_silent_is_not_waited_for() -> None:
    clients = ActiveClients()
    clients.entered("a", 0.0)
    clients.entered("gone", 0.0)
    clients.agree("a", 1.0)
    clients.sweep(IDLE_LIMIT_S)
    assert not clients.all_agreed
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]
    assert clients.all_agreed, "who has agreed has nothing more to say"


def test_a_client_that_is_heard_of_is_waited_for() -> None:
    clients = ActiveClients()
    clients.entered("a", 0.0)
    clients.seen("a", IDLE_LIMIT_S)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]


def test_each_batch_is_agreed_on_anew() -> None:
    clients = ActiveClients()
    clients.entered("a", 0.0)
    clients.agree("a", 0.0)
    clients.stepped()
    assert not clients.any_agreed
    clients.entered("a", 1.0)
    assert not clients.any_agreed
