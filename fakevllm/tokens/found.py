"""Finds what is to be shown: in the ledger, or at the server, which alone has active episodes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

from pydantic import ValidationError

from fakevllm.errors import UserError
from fakevllm.ledger.store import Ledger
from fakevllm.tokens.page import Page, of_ledger, of_server
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.token_view import GroupView

TIMEOUT_S = 30.0


def in_ledger(file: Path, episode: str | None) -> Page | None:
    """`episode`: a group or `GROUP/INDEX`, by how its id begins; None for the newest that
    was trained. None where there is no such group. Raises UserError."""
    if not file.exists():
        return None
    ledger = Ledger.open(file)
    try:
        group_id, index = _group_of(ledger, episode)
        group = None if group_id is None else ledger.group(group_id)
        return (
            None
            if group is None
            else of_ledger(group, ledger.calls.by_sibling(group.group_id), index)
        )
    finally:
        ledger.close()


def _group_of(ledger: Ledger, episode: str | None) -> tuple[str | None, int | None]:
    if episode is None:
        return ledger.calls.latest_group_id(), None
    beginning, slash, last = episode.rpartition("/")
    is_sibling = bool(slash) and last.isdecimal()
    wanted, index = (beginning, int(last)) if is_sibling else (episode, None)
    found = ledger.calls.group_ids(wanted)
    if len(found) > 1 and found[0] != wanted:
        raise UserError(f"Several groups begin with {wanted!r}: give more of its id.")
    return (found[0] if found else None), index


def at_server(swarm: str, key: str | None, episode: str) -> Page | None:
    """None where it knows nothing of it. Raises UserError."""
    url = f"{swarm.rstrip('/')}/get_episode_tokens?{urlencode({'episode': episode})}"
    try:
        request = urllib.request.Request(url, headers=bearer_header(key))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return of_server(GroupView.model_validate_json(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            if error.code == 401:
                raise UserError(
                    f"{swarm} asks for a good key: give an admin's with --swarm-key, or in "
                    "FAKEVLLM_SWARM_KEY."
                ) from None
            raise UserError(f"{swarm} says {error.code}: {_detail(error)}") from None
    except ValidationError:
        raise UserError(f"{swarm} is no server of this version.") from None
    except OSError as error:
        cause = getattr(error, "reason", error)
        raise UserError(
            f"{episode} is not in the ledger, and no server answers at {swarm} ({cause}): name "
            "the ledger with --ledger, or the server with --swarm."
        ) from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["detail"]
    except (ValueError, KeyError, TypeError):
        return error.reason
