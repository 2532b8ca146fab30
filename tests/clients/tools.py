"""The tool of all clients' sessions, and how the fake engine is made to call one."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.words import SUNNY, Json, say

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
"""Of every tool."""


def call(*calls: tuple[str, Json], then: str = SUNNY) -> str:
    """Makes the fake engine call these tools in one turn, and answer `then` once it has a result
    of each."""
    named = " & ".join(f"{name} {json.dumps(arguments)}" for name, arguments in calls)
    return f"[[call {named}]] {say(then)}"
