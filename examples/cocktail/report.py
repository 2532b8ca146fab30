"""A table of the requested mix of tasks and the mix that was trained.

python -m examples.cocktail.report [--steps 20]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable

import httpx
from rich.console import Console
from rich.table import Table

from examples import exit_codes
from examples.cocktail.tasks import MIXES
from examples.run_log import trained_steps
from fakevllm import SwarmError
from fakevllm_adapters.protocol.swarm import LogEntry


def trained_shares(steps: Iterable[LogEntry]) -> dict[str, float]:
    """Return each mix's share of the trained groups. Group ids have the form `task:MIX-…#…`."""
    counts = Counter(
        group.group_id.removeprefix("task:").partition("-")[0]
        for step in steps
        for group in step.groups
    )
    return {name: counts[name] / max(1, counts.total()) for name in MIXES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the trained mix of the first steps.")
    parser.add_argument("--server", default="http://127.0.0.1:10086")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    try:
        steps = trained_steps(options.server)[: options.steps]
    except httpx.HTTPError as error:
        raise SwarmError(f"No swarm server answers at {options.server} ({error})") from None
    table = Table("mix", "requested", "trained", title=f"{len(steps)} steps")
    for name, share in trained_shares(steps).items():
        table.add_row(name, f"{MIXES[name].share:.1%}", f"{share:.1%}")
    Console().print(table)


if __name__ == "__main__":
    exit_codes.run(main)
