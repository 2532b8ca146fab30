"""The mix that was trained beside the one that was asked for:

python -m examples.cocktail.report [--steps 20]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable

import httpx
from rich.console import Console
from rich.table import Table

from examples import ending
from examples.cocktail.tasks import MIXES
from examples.run_log import steps_of
from fakevllm import SwarmError
from fakevllm_adapters.protocol.swarm import LogEntry


def realised(steps: Iterable[LogEntry]) -> dict[str, float]:
    """The share of each mix in the groups of these steps; a group is named task:MIX-…#…"""
    found = Counter(
        group.group_id.removeprefix("task:").partition("-")[0]
        for step in steps
        for group in step.groups
    )
    return {name: found[name] / max(1, found.total()) for name in MIXES}


def main() -> None:
    parser = argparse.ArgumentParser(description="The realised mix of the first steps.")
    parser.add_argument("--server", default="http://127.0.0.1:10086")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    try:
        steps = steps_of(options.server)[: options.steps]
    except httpx.HTTPError as error:
        raise SwarmError(f"No swarm server answers at {options.server} ({error})") from None
    table = Table("mix", "asked", "realised", title=f"{len(steps)} steps")
    for name, share in realised(steps).items():
        table.add_row(name, f"{MIXES[name].share:.1%}", f"{share:.1%}")
    Console().print(table)


if __name__ == "__main__":
    ending.run(main)
