"""Generate requests with schemathesis from vLLM's OpenAPI document.

    python -m tests.openapi.generate DOCUMENT NUMBER [SEED] > CASES

NUMBER is the number of requests for each operation and kind, before duplicates are removed. The
module runs in a process of its own, because the import of schemathesis changes Hypothesis. The
requests are the same each time if the versions are the same, SEED is the same, and PYTHONHASHSEED
is 0.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from tests.openapi.cases import Case, limit_cost, to_json_lines
from tests.openapi.document import SERVED, Json, Operation, operations, restrict

KINDS = (("usual", "positive"), ("whole", "positive"), ("whole", "negative"))
"""The document to use, and whether requests follow its rules."""

SENT = {"method", "url", "params", "headers", "json", "data"}


def generate_cases(document: Json, num: int, chosen_seed: int) -> Iterator[Case]:
    """Yield the requests of all operations and kinds, without duplicates."""
    library: Any = importlib.import_module("schemathesis")
    schemas = {
        name: library.openapi.from_dict(source, config=library.Config())
        for name, source in {"whole": document, "usual": restrict(document)}.items()
    }
    for operation in sorted(SERVED & operations(document)):
        for name, mode in KINDS:
            method, path = operation
            strategy = schemas[name][path][method].as_strategy(
                generation_mode=library.GenerationMode(mode)
            )
            kind = f"{name}, {mode}"
            examples = _draw(strategy, num, chosen_seed)
            yield from dict.fromkeys(_case(operation, kind, example) for example in examples)


def _draw(strategy: Any, num: int, chosen_seed: int) -> list[Any]:
    examples: list[Any] = []

    @seed(chosen_seed)
    @settings(
        max_examples=num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        examples.append(example)

    try:
        collect()
    except Unsatisfiable:  # no request of this operation can break the rules
        assert not examples
    return examples


def _case(operation: Operation, kind: str, example: Any) -> Case:
    requests: Any = importlib.import_module("requests")
    example.body = limit_cost(operation[1], example.body)
    arguments: Json = example.as_transport_kwargs(base_url="http://engine")
    request = requests.Request(**{key: arguments[key] for key in SENT & arguments.keys()}).prepare()
    body: bytes | str = request.body or b""
    return Case(
        operation,
        kind,
        request.path_url,
        request.headers.get("content-type"),
        body if isinstance(body, bytes) else body.encode(),
    )


def main() -> None:
    file, num, *seeds = sys.argv[1:]
    document: Json = json.loads(Path(file).read_text())
    sys.stdout.write(to_json_lines(generate_cases(document, int(num), int(*seeds))))


if __name__ == "__main__":
    main()
