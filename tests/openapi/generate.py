"""Requests that schemathesis makes of vLLM's OpenAPI document.

    python -m tests.openapi.generate DOCUMENT NUMBER [SEED] > CASES

A process of its own, for schemathesis changes Hypothesis where it is loaded, and the requests must
be the same ones each time: started with PYTHONHASHSEED=0 they are, by the same versions. A SEED
other than 0 makes others. NUMBER: of each operation and kind, before doubles are left out.
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

from tests.openapi.cases import Case, tamed, written
from tests.openapi.document import SERVED, Json, Operation, operations, tightened

KINDS = (("usual", "positive"), ("whole", "positive"), ("whole", "negative"))
"""Of which document, and whether by its rules or against them."""

SENT = {"method", "url", "params", "headers", "json", "data"}


def cases(document: Json, num: int, chosen: int) -> Iterator[Case]:
    library: Any = importlib.import_module("schemathesis")
    schemas = {
        name: library.openapi.from_dict(drawn, config=library.Config())
        for name, drawn in {"whole": document, "usual": tightened(document)}.items()
    }
    for operation in sorted(SERVED & operations(document)):
        for name, mode in KINDS:
            method, path = operation
            strategy = schemas[name][path][method].as_strategy(
                generation_mode=library.GenerationMode(mode)
            )
            kind = f"{name}, {mode}"
            drawn = _drawn(strategy, num, chosen)
            yield from dict.fromkeys(_case(operation, kind, one) for one in drawn)


def _drawn(strategy: Any, num: int, chosen: int) -> list[Any]:
    found: list[Any] = []

    @seed(chosen)
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
    def collect(one: Any) -> None:
        found.append(one)

    try:
        collect()
    except Unsatisfiable:  # nothing of it can be against the rules
        assert not found
    return found


def _case(operation: Operation, kind: str, drawn: Any) -> Case:
    requests: Any = importlib.import_module("requests")
    drawn.body = tamed(operation[1], drawn.body)
    told: Json = drawn.as_transport_kwargs(base_url="http://engine")
    request = requests.Request(**{key: told[key] for key in SENT & told.keys()}).prepare()
    body: bytes | str = request.body or b""
    return Case(
        operation,
        kind,
        request.path_url,
        request.headers.get("content-type"),
        body if isinstance(body, bytes) else body.encode(),
    )


def main() -> None:
    file, num, *chosen = sys.argv[1:]
    document: Json = json.loads(Path(file).read_text())
    sys.stdout.write(written(cases(document, int(num), int(*chosen))))


if __name__ == "__main__":
    main()
