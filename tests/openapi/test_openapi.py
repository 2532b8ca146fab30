"""Whatever vLLM's own OpenAPI document lets an app ask, or does not, is taken or refused here as by
vLLM itself: no error of ours, no hang, the same verdict in the same words."""

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
from tests.differential.engines import DIRECT, WAYS, ways
from tests.openapi.asking import send
from tests.openapi.cases import Case, read
from tests.openapi.document import SERVED, Json, Operation, operations
from tests.openapi.known import for_engines, known
from tests.openapi.verdict import Verdict, verdict

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent.parent
SOURCES = [str(ROOT / name) for name in ("", "server", "adapters")]
NUM = 30
"""Requests of each operation and kind."""
NUM_SHOWN = 5
FEW = 10
TRANSLATED = [adapter.path for adapter in ADAPTERS.values()]


class Asked:
    """Each generated request's verdicts, asked for once and in all ways at a time."""

    def __init__(self, document: Json, urls: dict[str, str], cases: list[Case]) -> None:
        self.document = document
        self.cases = cases
        self.urls = urls
        self._pool = ThreadPoolExecutor(len(urls))
        self._verdicts: dict[Case, dict[str, Verdict]] = {}

    def of(self, operation: Operation) -> list[Case]:
        return [case for case in self.cases if case.operation == operation]

    def verdicts(self, case: Case) -> dict[str, Verdict]:
        if case not in self._verdicts:
            told = {way: self._pool.submit(self.ask, way, case) for way in self.urls}
            self._verdicts[case] = {way: one.result() for way, one in told.items()}
        return self._verdicts[case]

    def ask(self, way: str, case: Case) -> Verdict:
        shown = for_engines(case) if way == DIRECT else case
        begun = time.monotonic()
        seen = send(self.urls[way], shown, KEY)
        return verdict(seen, time.monotonic() - begun)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("openapi")
    (folder / "engines").mkdir()
    with ways(folder / "engines") as started:
        with urllib.request.urlopen(f"{started.urls[DIRECT]}/openapi.json", timeout=60) as answer:
            document: bytes = answer.read()
        file = folder / "openapi.json"
        file.write_bytes(document)
        yield Asked(json.loads(document), started.urls, read(generated(file)))


def generated(document: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "tests.openapi.generate", str(document), str(NUM)],
        cwd=document.parent,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_all_that_is_served_stands_in_vllms_document(asked: Asked) -> None:
    assert operations(asked.document) >= SERVED
    assert {case.operation for case in asked.cases} == SERVED


@pytest.mark.parametrize("operation", sorted(SERVED), ids=" ".join)
@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_taken_or_refused_as_by_vllm(
    asked: Asked, operation: Operation, way: str
) -> None:
    told: list[str] = []
    for case in asked.of(operation):
        direct, ours = (asked.verdicts(case)[one] for one in (DIRECT, way))
        if direct != ours and known(case, direct, ours) is None:
            told.append(f"{case}\n  vLLM: {direct}\n  here: {ours}")
    assert not told, "\n".join([f"{len(told)} of them differ", *told[:NUM_SHOWN]])


@pytest.mark.parametrize("way", WAYS)
def test_what_else_vllm_has_is_not_there(asked: Asked, way: str) -> None:
    for operation in operations(asked.document) - SERVED:
        case = Case(operation, "not served", operation[1], None, b"")
        assert asked.ask(way, case).status == 404, operation


@pytest.mark.parametrize("path", [*TRANSLATED, "/tokenize", "/v1/messages/count_tokens"])
def test_many_of_the_requests_are_taken_and_many_are_refused(asked: Asked, path: str) -> None:
    found = [asked.verdicts(case)[DIRECT] for case in asked.of(("POST", path))]
    taken = [one for one in found if one.status == 200]
    refused = [one for one in found if one.status == 400]
    assert len(taken) >= FEW and len(refused) >= FEW
