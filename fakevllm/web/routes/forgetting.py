"""The proxy's route for `fakevllm forget`."""

from __future__ import annotations

from fastapi import APIRouter

from fakevllm.errors import LedgerError
from fakevllm.forgetting.messages import PATH, ForgetReport, ForgetRequest
from fakevllm.forgetting.report import report_of
from fakevllm.web.proxy_components import ProxyComponents


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the proxy's HTTP route that the command `fakevllm forget` calls."""
    routes = APIRouter()

    @routes.post(PATH)
    async def forget(request: ForgetRequest) -> ForgetReport:
        """Delete the contents of a session, of an API key, or of one request."""
        own = str(proxy.config.ledger_file.expanduser().resolve())
        if request.ledger != own:
            return ForgetReport(
                refusal=f"The proxy at this address has the ledger {own}: set --url to the proxy "
                f"of {request.ledger}."
            )
        targets = [message.target() for message in request.targets]
        try:
            forgotten = await proxy.forgetter.forget(targets)
            proxy.resends.forget(*forgotten.found)
            deleted = await proxy.forget_requests.send_unsent(forgotten.found)
        except LedgerError as error:
            return ForgetReport(refusal=str(error))
        return await report_of(proxy.ledger, forgotten, deleted)

    return routes
