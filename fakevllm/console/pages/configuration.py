"""The page Configuration. It shows the proxy's settings with the origin of each value, the training
job, and the settings that the server reports."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.sources.proxy_settings import read_settings, server_rows


def router(parts: ConsoleParts) -> APIRouter:
    """Return the route of the page Configuration."""
    routes = APIRouter()

    @routes.get("/configuration")
    def configuration(request: Request, all: str = "") -> Response:
        settings = parts.settings
        view = read_settings(
            settings.proxy_url, settings.proxy_key, settings.server_url, settings.server_key
        )
        shows_defaults = all == "yes"
        sections = {
            name: [row for row in rows if shows_defaults or not row.is_default or row.at_server]
            for name, rows in view.sections.items()
        }
        return parts.page(
            request,
            "configuration.html",
            view=view,
            sections={name: rows for name, rows in sections.items() if rows},
            num_settings=sum(len(rows) for rows in view.sections.values()),
            shows_defaults=shows_defaults,
            server=server_rows(parts.proxy.view().engine),
            server_url=settings.server_url,
        )

    return routes
