"""The proxy's route for its settings, without secrets."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from fakevllm.config.setting_origins import Origin, settings_of
from fakevllm.web.proxy_components import ProxyComponents


class SettingReply(BaseModel):
    """One setting of the proxy."""

    key: str
    """Section and name, such as `proxy.port`."""
    value: str
    """The value as JSON. For a secret, `set` or `not set`."""
    origin: Origin
    """Place from which the value came."""


class ConfigurationReply(BaseModel):
    """The settings with which the proxy was started."""

    file: str | None
    """The configuration file; None if there was none."""
    settings: list[SettingReply]


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the route for the settings."""
    routes = APIRouter(prefix="/fakevllm")

    @routes.get("/configuration")
    async def configuration() -> ConfigurationReply:
        """Return the settings of the proxy and the places from which they came. Secrets appear only
        as `set` or `not set`."""
        sources = proxy.sources
        return ConfigurationReply(
            file=None if sources.file is None else str(sources.file.absolute()),
            settings=[
                SettingReply.model_validate(setting, from_attributes=True)
                for setting in settings_of(proxy.config, sources)
            ],
        )

    return routes
