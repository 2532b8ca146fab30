"""`from fakevllm import …` exports the listed names and imports them lazily."""

from __future__ import annotations

import subprocess
import sys

import fakevllm


def test_each_listed_name_is_exported() -> None:
    for name in fakevllm.__all__:
        assert getattr(fakevllm, name).__name__ == name
        assert name in dir(fakevllm)


def test_importing_the_package_imports_no_http_client() -> None:
    code = "import sys, fakevllm; print(sorted({'httpx', 'openai', 'pydantic'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"


def test_an_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(fakevllm, "SwarmKlient")
