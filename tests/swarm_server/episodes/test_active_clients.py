"""Active clients: which clients take part in a step, and when they agree to start training."""

from __future__ import annotations

from fakevllm_server.episodes.active_clients import IDLE_LIMIT_S, MAX_SILENT, ActiveClients


def test_one_agreement_of_two_counts_for_any_but_not_for_all() -> None:
    clients = ActiveClients()
    assert not clients.any_agreed and not clients.all_agreed
    clients.add("a", 0.0)
    clients.add("b", 0.0)
    assert clients.agree("a", 1.0) is None
    assert clients.any_agreed and not clients.all_agreed
    assert clients.agree("b", 1.0) is None
    assert clients.all_agreed


def test_a_client_that_has_ended_no_episode_cannot_agree() -> None:
    clients = ActiveClients()
    clients.touch("a", 0.0)
    refusal = clients.agree("a", 1.0)
    assert refusal is not None and refusal.startswith(
        "Client a is not in the active list -- it must"
    )
    assert clients.agree("", 1.0) == "client_uuid required"
    assert not clients.any_agreed


def test_an_idle_client_is_not_waited_for() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.add("gone", 0.0)
    clients.agree("a", 1.0)
    clients.sweep(IDLE_LIMIT_S)
    assert not clients.all_agreed
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]
    assert clients.all_agreed, "an idle client does not prevent the agreement"


def test_a_request_of_a_client_restarts_its_idle_limit() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.touch("a", IDLE_LIMIT_S)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]


def test_an_idle_client_may_still_agree() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert not list(clients)
    assert clients.agree("a", IDLE_LIMIT_S + 2) is None
    assert clients.all_agreed
    clients.clear()
    assert clients.agree("a", IDLE_LIMIT_S + 3) is not None


def test_an_idle_client_cannot_agree_to_the_next_step() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    clients.clear()
    assert clients.agree("a", IDLE_LIMIT_S + 2) is not None


def test_restored_clients_may_agree_but_are_not_waited_for() -> None:
    clients = ActiveClients()
    clients.restore(["a", "b", "gone"])
    clients.add("b", 0.0)
    assert clients.agree("a", 1.0) is None
    assert not clients.all_agreed, "b has ended something again"
    assert clients.agree("b", 2.0) is None
    assert clients.all_agreed


def test_the_number_of_remembered_idle_clients_is_limited() -> None:
    clients = ActiveClients()
    clients.restore([str(number) for number in range(MAX_SILENT)])
    clients.add("last", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert clients.agree("0", 0.0) is not None
    assert clients.agree("1", 0.0) is None and clients.agree("last", 0.0) is None


def test_agreements_are_reset_after_each_batch() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.agree("a", 0.0)
    clients.clear()
    assert not clients.any_agreed
    clients.add("a", 1.0)
    assert not clients.any_agreed
