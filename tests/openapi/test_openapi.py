"""Requests that are generated from vLLM's own OpenAPI document get vLLM's verdict.

They are accepted or refused as by vLLM itself, with the same error text, without errors of our own
and without hanging.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakevllm_adapters.formats.registry import ADAPTERS
from tests.differential.corpus import KEY
from tests.differential.engines import DIRECT, SIBLINGS, start_all
from tests.openapi.case_sender import send
from tests.openapi.cases import Case, from_json_lines
from tests.openapi.document import SERVED, Json, Operation, operations
from tests.openapi.known_differences import known, without_removed_fields
from tests.openapi.verdict import Verdict, create_verdict

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent.parent
SOURCES = [str(ROOT / name) for name in ("", "server", "adapters")]
NUM = 30
"""Number of generated requests for each operation and kind."""
NUM_SHOWN = 5
MIN_EACH = 10
TRANSLATED = [adapter.path for adapter in ADAPTERS.values()]


class Verdicts:
    """Verdicts of the generated requests. Each request is sent once, to all setups at the same
    time."""

    def __init__(self, document: Json, urls: dict[str, str], cases: list[Case]) -> None:
        self.document = document
        self.cases = cases
        self.urls = urls
        self._pool = ThreadPoolExecutor(len(urls))
        self._verdicts: dict[Case, dict[str, Verdict]] = {}

    def cases_of(self, operation: Operation) -> list[Case]:
        """Return the generated requests of one operation."""
        return [case for case in self.cases if case.operation == operation]

    def by_setup(self, case: Case) -> dict[str, Verdict]:
        """Return the verdict of each setup."""
        if case not in self._verdicts:
            futures = {name: self._pool.submit(self.send, name, case) for name in self.urls}
            self._verdicts[case] = {name: future.result() for name, future in futures.items()}
        return self._verdicts[case]

    def send(self, setup: str, case: Case) -> Verdict:
        """Send the request to one setup, and return the verdict."""
        sent = without_removed_fields(case) if setup == DIRECT else case
        started = time.monotonic()
        response = send(self.urls[setup], sent, KEY)
        return create_verdict(response, time.monotonic() - started)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    folder = tmp_path_factory.mktemp("openapi")
    (folder / "engines").mkdir()
    with start_all(folder / "engines") as setups:
        with urllib.request.urlopen(f"{setups.urls[DIRECT]}/openapi.json", timeout=60) as answer:
            document: bytes = answer.read()
        file = folder / "openapi.json"
        file.write_bytes(document)
        yield Verdicts(json.loads(document), setups.urls, from_json_lines(generate(file)))


def generate(document: Path) -> str:
    """Generate requests in a process of its own, and return them as JSON lines."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.openapi.generate", str(document), str(NUM)],
        cwd=document.parent,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_served_operation_is_in_vllms_document(verdicts: Verdicts) -> None:
    assert operations(verdicts.document) >= SERVED
    assert {case.operation for case in verdicts.cases} == SERVED


@pytest.mark.parametrize("operation", sorted(SERVED), ids=" ".join)
@pytest.mark.parametrize("setup", SIBLINGS)
def test_a_request_is_accepted_or_refused_as_by_vllm(
    verdicts: Verdicts, operation: Operation, setup: str
) -> None:
    lines: list[str] = []
    for case in verdicts.cases_of(operation):
        direct, ours = (verdicts.by_setup(case)[name] for name in (DIRECT, setup))
        if direct != ours and known(case, direct, ours) is None:
            lines.append(f"{case}\n  vLLM: {direct}\n  here: {ours}")
    assert not lines, "\n".join([f"{len(lines)} requests differ:", *lines[:NUM_SHOWN]])


@pytest.mark.parametrize("setup", SIBLINGS)
def test_other_operations_of_vllm_are_not_found(verdicts: Verdicts, setup: str) -> None:
    for operation in operations(verdicts.document) - SERVED:
        case = Case(operation, "not served", operation[1], None, b"")
        assert verdicts.send(setup, case).status == 404, operation


@pytest.mark.parametrize("path", [*TRANSLATED, "/tokenize", "/v1/messages/count_tokens"])
def test_many_requests_are_accepted_and_many_are_refused(verdicts: Verdicts, path: str) -> None:
    cases = verdicts.cases_of(("POST", path))
    direct = [verdicts.by_setup(case)[DIRECT] for case in cases]
    accepted = [verdict for verdict in direct if verdict.status == 200]
    refused = [verdict for verdict in direct if verdict.status == 400]
    assert len(accepted) >= MIN_EACH and len(refused) >= MIN_EACH
