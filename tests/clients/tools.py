"""The tools of the clients' sessions, and prompts that make the fake engine call them."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.prompts import SUNNY, Json, say

CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
}
OSLO = ("get_weather", {"city": "Oslo"})
ROME = ("get_weather", {"city": "Rome"})
RESULT = "21 degrees, no clouds"
"""The result of every tool."""


def call(*calls: tuple[str, Json], then: str = SUNNY) -> str:
    """Return a prompt for calls of these tools in one turn.

    When the fake engine has all results, it answers `then`.
    """
    named = " & ".join(f"{name} {json.dumps(arguments)}" for name, arguments in calls)
    return f"[[call {named}]] {say(then)}"
