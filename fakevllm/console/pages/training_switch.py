"""The page Training, on which an operator pauses the training on new requests, or resumes it. Its
buttons do what `fakevllm pause` and `fakevllm resume` do."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from fakevllm.console.access.login import Login
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import set_paused


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Training."""
    routes = APIRouter()
    login = Login(parts)

    @routes.get("/training")
    def training(request: Request) -> Response:
        return page(request)

    @routes.post("/training/pause")
    def pause(request: Request, _: dict[str, str] = Depends(login.form)) -> Response:
        return switch(request, is_paused=True)

    @routes.post("/training/resume")
    def resume(request: Request, _: dict[str, str] = Depends(login.form)) -> Response:
        return switch(request, is_paused=False)

    def switch(request: Request, *, is_paused: bool) -> Response:
        settings = parts.settings
        try:
            result = set_paused(settings.proxy_url, settings.proxy_key, paused=is_paused)
        except ConfigError as error:  # translates: the page shows the sentence
            return page(request, refusal=str(error), status=409)
        parts.proxy.forget()
        return page(request, result=f"The fan-out is {result}.")

    def page(
        request: Request, *, result: str = "", refusal: str = "", status: int = 200
    ) -> Response:
        return parts.page(
            request,
            "training_switch.html",
            status=status,
            proxy=parts.proxy.view(),
            result=result,
            refusal=refusal,
        )

    return routes
