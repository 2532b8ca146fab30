"""Who takes part, and when all agree."""

from __future__ import annotations

from fakevllm_server.episodes.active_clients import IDLE_LIMIT_S, MAX_SILENT, ActiveClients


def test_one_client_that_agrees_is_any_and_not_all() -> None:
    clients = ActiveClients()
    assert not clients.any_agreed and not clients.all_agreed
    clients.add("a", 0.0)
    clients.add("b", 0.0)
    assert clients.agree("a", 1.0) is None
    assert clients.any_agreed and not clients.all_agreed
    assert clients.agree("b", 1.0) is None
    assert clients.all_agreed


def test_a_client_that_has_ended_nothing_has_no_say() -> None:
    clients = ActiveClients()
    clients.touch("a", 0.0)
    refusal = clients.agree("a", 1.0)
    assert refusal is not None and refusal.startswith(
        "Client a is not in the active list -- it must"
    )
    assert clients.agree("", 1.0) == "client_uuid required"
    assert not clients.any_agreed


def test_a_client_that_is_silent_is_not_waited_for() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.add("gone", 0.0)
    clients.agree("a", 1.0)
    clients.sweep(IDLE_LIMIT_S)
    assert not clients.all_agreed
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]
    assert clients.all_agreed, "who has agreed has nothing more to say"


def test_a_client_that_is_heard_of_is_waited_for() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.touch("a", IDLE_LIMIT_S)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert [client.client_uuid for client in clients] == ["a"]


def test_a_client_that_was_silent_for_too_long_may_still_agree() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert not list(clients)
    assert clients.agree("a", IDLE_LIMIT_S + 2) is None
    assert clients.all_agreed
    clients.clear()
    assert clients.agree("a", IDLE_LIMIT_S + 3) is not None


def test_a_client_that_is_heard_of_no_more_has_no_say_in_the_next_step() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    clients.clear()
    assert clients.agree("a", IDLE_LIMIT_S + 2) is not None


def test_owners_of_what_an_earlier_life_left_may_agree_and_are_not_waited_for() -> None:
    clients = ActiveClients()
    clients.restore(["a", "b", "gone"])
    clients.add("b", 0.0)
    assert clients.agree("a", 1.0) is None
    assert not clients.all_agreed, "b has ended something again"
    assert clients.agree("b", 2.0) is None
    assert clients.all_agreed


def test_no_more_silent_clients_are_remembered_than_there_is_room_for() -> None:
    clients = ActiveClients()
    clients.restore([str(number) for number in range(MAX_SILENT)])
    clients.add("last", 0.0)
    clients.sweep(IDLE_LIMIT_S + 1)
    assert clients.agree("0", 0.0) is not None
    assert clients.agree("1", 0.0) is None and clients.agree("last", 0.0) is None


def test_each_batch_is_agreed_on_anew() -> None:
    clients = ActiveClients()
    clients.add("a", 0.0)
    clients.agree("a", 0.0)
    clients.clear()
    assert not clients.any_agreed
    clients.add("a", 1.0)
    assert not clients.any_agreed
