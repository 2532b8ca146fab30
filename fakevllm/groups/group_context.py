"""GroupContext, which holds the objects that belong to one request of an app. The request pipeline
creates the GroupContext and passes it to the group executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakevllm.config.serving import ServeRules
from fakevllm.groups.group_record import GroupDraft
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm_adapters.http.asgi import Receive


@dataclass(slots=True)
class GroupContext:
    """One request of an app, and the objects that are needed until the app has its answer."""

    draft: GroupDraft
    """The draft of the ledger record for the request and its siblings (the answers sampled for
    it)."""
    rules: ServeRules
    """The rules by which requests of this API route are answered."""
    app: AppResponse
    """The response to the app."""
    receive: Receive
    """The ASGI function `receive` of the app's connection, which reports when the app
    disconnects."""
    plan: SiblingPlan = field(default_factory=lambda: SiblingPlan(1))
    """The number of siblings to sample, and the request body for each sibling. The plan is set
    once, before the first call to the engine."""

    @property
    def request(self) -> Request:
        return self.draft.request
