"""`from fakevllm import …` has what it lists, and loads nothing before it is asked."""

from __future__ import annotations

import subprocess
import sys

import fakevllm


def test_every_name_that_is_listed_is_there() -> None:
    for name in fakevllm.__all__:
        assert getattr(fakevllm, name).__name__ == name
        assert name in dir(fakevllm)


def test_the_package_alone_loads_no_http_client() -> None:
    code = "import sys, fakevllm; print(sorted({'httpx', 'openai', 'pydantic'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(fakevllm, "SwarmKlient")
