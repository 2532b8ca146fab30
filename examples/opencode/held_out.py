"""Write the held-out rows of the release gate: questions that are never trained, each with the
request that opencode sends for the question.

python -m examples.opencode.held_out --out runs/opencode-held-out.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.opencode.opencode_command import QUESTION, locate_command, record_request
from examples.opencode.tasks import all_turns

Json = dict[str, Any]

EVERY = 5
"""One question out of this number of questions is held out."""


def held_out_rows(request: Json) -> Iterator[Json]:
    """Yield the rows. `request` is opencode's request for the question QUESTION. Raises ValueError
    if the request does not contain this question."""
    messages = json.dumps(request["messages"])
    if QUESTION not in messages:
        raise ValueError(f"opencode's request does not contain the question {QUESTION!r}")
    for turn in all_turns()[::EVERY]:
        # Neither question has characters that JSON escapes.
        own = json.loads(messages.replace(QUESTION, turn.question))
        yield asdict(turn) | {"messages": own, "tools": request["tools"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--opencode", default="opencode", type=locate_command)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(row) for row in held_out_rows(record_request(options.opencode))]
    options.out.write_text("\n".join(rows) + "\n")
    print(f"{len(rows)} rows are in {options.out}.")


if __name__ == "__main__":
    main()
