"""Load the tokens of a group or an episode from the ledger or from the server. The ledger has the
groups of a proxy. The episodes of agents that use the server without a proxy are only at the
server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

from pydantic import ValidationError

from fakevllm.errors import UserError
from fakevllm.ledger.offline_copy import offline_ledger
from fakevllm.ledger.store import Ledger
from fakevllm.tokens.page import Page, ledger_page, server_page
from fakevllm_adapters.protocol.group_tokens import GroupView
from fakevllm_adapters.protocol.keys import bearer_header

TIMEOUT_S = 30.0


def load_from_ledger(file: Path, episode: str | None) -> Page | None:
    """Read a group or one of its siblings from the ledger `file`. Return the page that shows the
    tokens. Return None if the ledger has no such group.

    `episode` is the beginning of a group's id. To show a single sibling, add a slash and the
    sibling's index: `GROUP/INDEX`. If `episode` is None, show the group that was trained last. If
    no group was trained, show the last group with tokens. Raises UserError if several groups match.
    """
    if not file.exists():
        return None
    ledger = Ledger.open(offline_ledger(file))
    try:
        group_id, index = _find_group(ledger, episode)
        group = None if group_id is None else ledger.group(group_id)
        if group is None:
            return None
        return ledger_page(group, ledger.calls.by_sibling(group.group_id), index)
    finally:
        ledger.close()


def _find_group(ledger: Ledger, episode: str | None) -> tuple[str | None, int | None]:
    """Return a pair: the id of the group that `episode` selects, and the index of the sibling that
    `episode` selects.

    The id is None if no group matches. The index is None if `episode` selects a whole group. Raises
    UserError if several groups match.
    """
    if episode is None:
        return ledger.calls.latest_group_id(), None
    prefix, slash, suffix = episode.rpartition("/")
    is_sibling = bool(slash) and suffix.isdecimal()
    prefix, index = (prefix, int(suffix)) if is_sibling else (episode, None)
    group_ids = ledger.calls.group_ids(prefix)
    if len(group_ids) > 1 and group_ids[0] != prefix:
        raise UserError(f"The ids of several groups begin with {prefix!r}: write more characters.")
    return (group_ids[0] if group_ids else None), index


def load_from_server(swarm: str, key: str | None, episode: str) -> Page | None:
    """Request an episode or a group from the server at `swarm`, and return the page that shows it.
    Return None if the server does not know the episode or group.

    Raises UserError if the server cannot be reached or refuses the request.
    """
    url = f"{swarm.rstrip('/')}/get_episode_tokens?{urlencode({'episode': episode})}"
    try:
        request = urllib.request.Request(url, headers=bearer_header(key))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return server_page(GroupView.model_validate_json(reply.read()))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            if error.code == 401:
                raise UserError(
                    f"The server {swarm} needs a valid API key: pass an admin's key with "
                    "--swarm-key, or in the environment variable FAKEVLLM_SWARM_KEY."
                ) from None
            raise UserError(
                f"The server {swarm} refused the request with status {error.code}: {_detail(error)}"
            ) from None
    except ValidationError:
        raise UserError(
            f"The reply of {swarm} cannot be parsed: it is no swarm server, or one of another "
            "version."
        ) from None
    except OSError as error:
        cause = getattr(error, "reason", error)
        raise UserError(
            f"{episode} is not in the ledger, and no server answers at {swarm} ({cause}): name "
            "the ledger with --ledger, or the server with --swarm."
        ) from None


def _detail(error: urllib.error.HTTPError) -> str:
    """Return the error message in the server's response. If the response has no error message,
    return the standard phrase of the HTTP status, such as "Not Found"."""
    try:
        return json.load(error)["detail"]
    except (ValueError, KeyError, TypeError):
        return error.reason
