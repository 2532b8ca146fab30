"""Who may do what: routes for admins, and episodes for those whose key claimed them.

Clients ask the model, play their own episodes, end groups and look; what stops others, or shows
what others said, is for admins. Groups of passive traffic belong to nobody: their ids are random,
and only the proxy that made one knows it while it is open.
"""

from __future__ import annotations

from fakevllm_adapters.http.asgi import Scope, header_map
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, error_body, unauthorized
from fakevllm_adapters.protocol.keys import EPISODE_KEY_PREFIX
from fakevllm_server.web.state import ServerState

ADMIN_PATHS = frozenset(
    {
        "/sync_train_config",
        "/sync_train_code",
        "/start_engine",
        "/stop_engine",
        "/pause_claims",
        "/resume_claims",
        "/replay_latest_llm_call",
        "/get_episode_tokens",
    }
)
_CALLED = ("/v1/", "/e/")
"""Below these stands what calls the model, and nothing else."""


def caller_of(state: ServerState, scope: Scope) -> str:
    """Whose episodes the bearer of a request's key may play; "" where no key is asked for."""
    return state.config.keys.owner_of(api_key_of(header_map(scope)))


def is_admin(state: ServerState, scope: Scope) -> bool:
    return state.config.keys.is_admin(api_key_of(header_map(scope)))


def opens_episode(state: ServerState, key: str | None, path: str) -> bool:
    """Whether it is a claimed episode's key where calls to the model are taken. With the key of who
    claimed it, it ends too."""
    episode = state.episodes.find_by_key(key)
    return (
        episode is not None
        and path.startswith(_CALLED)
        and state.config.keys.has_owner(episode.owner)
    )


def stranger(state: ServerState, key: str | None, path: str) -> WireError:
    """An episode's key that comes late is told so, as it is where no key is asked for."""
    is_late = key is not None and key.startswith(EPISODE_KEY_PREFIX) and path.startswith(_CALLED)
    return (
        unclaimed_key() if is_late and state.episodes.find_by_key(key) is None else unauthorized()
    )


def unclaimed_key() -> WireError:
    return not_found("The episode of this key is not claimed, cannot accept new requests.")


def not_found(message: str) -> WireError:
    return WireError(404, error_body(message, "NotFoundError", 404))
