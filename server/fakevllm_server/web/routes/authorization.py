"""Access rules of the server. Some routes are only for admins. An episode may be used only with the
API keys of the owner who claimed it.

Clients may call the model, claim and end their own episodes, end groups, and read the status.
Routes that affect other clients, or show other clients' calls, are only for admins. A group (the
answers that are sampled for one request of an app) has no owner. Instead, its random id protects
it: while the group is open, only the proxy that created the group knows the id.
"""

from __future__ import annotations

from fakevllm_adapters.http.asgi import Scope, header_map
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, error_body, unauthorized
from fakevllm_adapters.protocol.keys import EPISODE_KEY_PREFIX
from fakevllm_server.web.server_state import ServerState

ADMIN_PATHS = frozenset(
    {
        "/sync_train_config",
        "/sync_train_code",
        "/start_engine",
        "/stop_engine",
        "/pause_claims",
        "/resume_claims",
        "/load_policy",
        "/unload_policy",
        "/releases",
        "/release",
        "/rollback",
        "/training_limit",
        "/forget_groups",
        "/add_logged_group",
        "/replay_latest_llm_call",
        "/get_episode_tokens",
    }
)
"""Paths that need a key with the role admin."""

_MODEL_PATHS = ("/v1/", "/e/")
"""Prefixes of all paths that call the model. No other path has one of them."""


def caller_of(state: ServerState, scope: Scope) -> str:
    """Return the owner id of the API key in a request, or "" if the server requires no keys. A
    client may use the episodes that were claimed with a key of the same owner."""
    return state.config.keys.owner_of(api_key_of(header_map(scope)))


def is_admin(state: ServerState, scope: Scope) -> bool:
    """Return True if the request's key has the role admin, or if the server requires no keys."""
    return state.config.keys.is_admin(api_key_of(header_map(scope)))


def is_key_of_episode(state: ServerState, key: str | None, path: str) -> bool:
    """Return True if `key` is the key of a claimed episode and `path` calls the model.

    An episode's key stops working when the owner who claimed the episode has no valid API key any
    more.
    """
    episode = state.episodes.find_by_key(key)
    return (
        episode is not None
        and path.startswith(_MODEL_PATHS)
        and state.config.keys.has_owner(episode.owner)
    )


def invalid_key_error(state: ServerState, key: str | None, path: str) -> WireError:
    """Return the error for an invalid API key.

    The status is 404 if the request calls the model with the key of an episode that is no longer
    claimed. Otherwise the status is 401.
    """
    is_late = (
        key is not None and key.startswith(EPISODE_KEY_PREFIX) and path.startswith(_MODEL_PATHS)
    )
    return (
        unclaimed_key() if is_late and state.episodes.find_by_key(key) is None else unauthorized()
    )


def unclaimed_key() -> WireError:
    """Return the error (404) for the API key of an episode that is not claimed."""
    return not_found("The episode of this key is not claimed, cannot accept new requests.")


def not_found(message: str) -> WireError:
    """Return an error with status 404 in vLLM's error format."""
    return WireError(404, error_body(message, "NotFoundError", 404))
