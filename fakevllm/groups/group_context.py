"""The objects that belong to one app request. The request pipeline and the group executor share
them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakevllm.config.serving import ServeRules
from fakevllm.groups.group_record import GroupDraft
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm_adapters.http.asgi import Receive


@dataclass(slots=True)
class GroupContext:
    """One app request, with the objects that are needed until the app has its answer."""

    draft: GroupDraft
    """Collects the group's ledger record."""
    rules: ServeRules
    """The serve policy of the request's route."""
    app: AppResponse
    """The response to the app."""
    receive: Receive
    """The ASGI `receive` of the app's connection; it reports a disconnect."""
    plan: SiblingPlan = field(default_factory=lambda: SiblingPlan(1))
    """The number of siblings and the body of each. Set once, before the first call upstream."""

    @property
    def request(self) -> Request:
        return self.draft.request
