import pytest

from fakevllm_adapters.guard import Guard
from fakevllm_adapters.keys import KeyRing, bearer, keys_in, task_id_of, task_key

OPEN = Guard(open_paths={"/health"})
KEYED = Guard(KeyRing(["sk-one"]), open_paths={"/health"})


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
def test_loopback_names_are_served(host: str) -> None:
    assert OPEN.refusal("POST", "/v1/x", host, None, None) is None


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "[::1"])
def test_a_rebound_name_is_refused(host: str) -> None:
    refusal = OPEN.refusal("GET", "/v1/x", host, None, None)
    assert refusal is not None and refusal.status == 403


def test_a_post_from_another_origin_is_refused_and_one_from_our_own_is_not() -> None:
    foreign = OPEN.refusal("POST", "/start_engine", "localhost", "https://evil.example", None)
    assert foreign is not None and foreign.status == 403
    assert OPEN.refusal("POST", "/x", "localhost", "http://localhost:3000", None) is None
    for odd in ("null", "http://[", ""):
        assert OPEN.refusal("POST", "/x", "localhost", odd, None) is not None


def test_with_keys_everything_but_the_open_paths_needs_one() -> None:
    assert KEYED.refusal("GET", "/health", "localhost", None, None) is None
    assert KEYED.refusal("GET", "/v1/models", "localhost", None, "sk-one") is None
    for key in (None, "sk-two", ""):
        refusal = KEYED.refusal("GET", "/v1/models", "localhost", None, key)
        assert refusal is not None and refusal.status == 401
        assert refusal.body == {"error": "Unauthorized"}


def test_keys_of_claimed_episodes_open_the_paths_they_are_for_and_no_other() -> None:
    guard = Guard(
        KeyRing(["sk-one"]),
        own_keys=lambda key, path: key == "sk-episode" and path.startswith("/v1/"),
    )
    assert guard.refusal("POST", "/v1/x", "localhost", None, "sk-episode") is None
    refusal = guard.refusal("POST", "/stop_engine", "localhost", None, "sk-episode")
    assert refusal is not None and refusal.status == 401


def test_keys_and_their_meanings() -> None:
    assert bearer("Bearer sk-1") == bearer("bearer sk-1") == "sk-1"
    assert bearer("Basic abc") is None and bearer(None) is None
    assert task_id_of(task_key("row-1")) == "row-1"
    assert task_id_of("sk-other") is None and task_id_of("sk-task-") is None
    assert keys_in("# one\n a \n\nb") == ["a", "b"]
