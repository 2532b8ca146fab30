"""Requests about releases that an operator sends to the swarm server, with `fakevllm release …` or
in the console."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fakevllm.errors import UserError
from fakevllm.sdk.http_driver import HttpDriver
from fakevllm.sdk.protocol import Backoff, ServerRequest, fetch, fetch_with_retries
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseRecord,
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
    RollbackRequest,
)

TIMEOUT_S = 90.0
"""Timeout of one request, in seconds. A decision waits for the end of a training step. If the step
takes longer than 60 seconds, the server answers that the decision is still pending."""
MAX_WAIT_S = 600.0
"""Maximum number of seconds for which the command repeats a decision that the server has not
carried out yet."""
_DECISION_ID = re.compile(r"operator-[\w-]{1,100}")

M = TypeVar("M", bound=BaseModel)


def new_decision_id() -> str:
    """Return a new id for an operator's decision. It begins with `operator`. The id of a decision
    of the release gate begins with the gate's name instead."""
    return f"operator-{new_id()}"


@dataclass(frozen=True, slots=True)
class DecisionTarget:
    """The id of a decision, and the training run that the decision is about."""

    run_id: str | None
    """Id of the run to which the decision's version belongs. If the server has changed to another
    run meanwhile, the server refuses the decision, because the other run has other versions."""
    id: str = field(default_factory=new_decision_id)
    """Id of the decision. The server carries out a decision with a known id only once."""

    def __post_init__(self) -> None:
        if _DECISION_ID.fullmatch(self.id) is None:
            raise ValueError("the id of an operator's decision begins with operator-")


class ReleaseRequests:
    """A client of the server's routes for releases. Use it as a context manager."""

    def __init__(self, url: str, key: str | None, max_wait_s: float = MAX_WAIT_S) -> None:
        self.url = url
        self._max_wait_s = max_wait_s
        self._http = HttpDriver(url, key)

    def __enter__(self) -> ReleaseRequests:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def history(self) -> ReleasesReply:
        """Return the server's history of releases: all decisions about versions of the weights.
        Raises UserError if the server does not send it."""
        return self._run(ServerRequest("/releases"), ReleasesReply, is_decision=False)

    def promote(
        self, version: int, *, force: bool, target: DecisionTarget | None = None
    ) -> ReleaseRecord:
        """Ask the server to release this version of the weights. If `target` is None, the version
        belongs to the server's present run. Raises UserError if the server refuses."""
        return self._decide(Decision.RELEASED, version, force=force, target=target)

    def hold(self, *, target: DecisionTarget | None = None) -> ReleaseRecord:
        """Ask the server to release no version of the weights until `resume` is called. If `target`
        is None, the decision is about the server's present run. Raises UserError if the server
        refuses."""
        return self._decide(Decision.HOLD, target=target)

    def resume(self, *, target: DecisionTarget | None = None) -> ReleaseRecord:
        """Ask the server to allow releases again, after `hold` has stopped them. If `target` is
        None, the decision is about the server's present run. Raises UserError if the server
        refuses."""
        return self._decide(Decision.RESUME, target=target)

    def roll_back(
        self, version: int | None, *, target: DecisionTarget | None = None
    ) -> ReleaseRecord:
        """Ask the server to let training go back to a version of the weights. If `version` is None,
        training goes back to the released version. If `target` is None, the version belongs to the
        server's present run. Raises UserError if the server refuses."""
        target = target or self._present_run()
        body = RollbackRequest(id=target.id, run_id=target.run_id, version=version)
        return self._post("/rollback", body)

    def _decide(
        self,
        decision: Decision,
        version: int | None = None,
        *,
        force: bool = False,
        target: DecisionTarget | None = None,
    ) -> ReleaseRecord:
        target = target or self._present_run()
        body = ReleaseRequest(
            id=target.id, run_id=target.run_id, decision=decision, version=version, force=force
        )
        return self._post("/release", body)

    def _present_run(self) -> DecisionTarget:
        """Return the target of a new decision about the server's present run. Raises UserError at
        once if no server answers, or if the server knows no releases."""
        return DecisionTarget(self.history().run_id)

    def _post(self, path: str, message: BaseModel) -> ReleaseRecord:
        """Send an operator's decision to the server."""
        request = ServerRequest(path, message.model_dump(mode="json"), TIMEOUT_S)
        reply = self._run(request, ReleaseReply, is_decision=True)
        if not reply.success or reply.record is None:
            raise UserError(reply.failure_reason or f"The server at {self.url} made no decision.")
        return reply.record

    def _run(self, request: ServerRequest, reply: type[M], *, is_decision: bool) -> M:
        """Send a request to the server, and return the reply. While the server is busy, a decision
        is sent again. This is safe, because the server carries out a decision with a known id only
        once. If the request fails, raises UserError, whose message says what the user can do."""
        call = fetch(request, reply)
        if is_decision:
            call = fetch_with_retries(request, reply, Backoff(self._max_wait_s))
        try:
            return self._http.run(call)
        except ServerUnreachable as error:
            raise UserError(
                f"{error.detail}: start it with `fakevllm-server start`, or set --swarm."
            ) from None
        except SwarmError as error:
            raise UserError(self._advice(error)) from None
        except ValidationError:
            raise UserError(
                f"{self.url}{request.path} was not answered by a swarm server: set --swarm."
            ) from None

    def _advice(self, error: SwarmError) -> str:
        match error.status:
            case 401:
                return "The server needs an API key: pass an admin's key with --swarm-key."
            case 403:
                return "This key may not decide about releases: pass an admin's key (--swarm-key)."
            case 404 | 405:
                return (
                    f"The server at {self.url} does not know releases: update fakevllm-server, or "
                    "set --swarm."
                )
            case _:
                return f"The server at {self.url} refused: {error.detail}"
