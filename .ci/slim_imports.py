"""Check an environment that has only the wheel and its core dependencies: the packages can be
imported, and they import no heavy dependency."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "ray", "vllm", "verl", "matplotlib", "opentelemetry")
OURS = ("fakevllm", "fakevllm_adapters", "fakevllm_runtime", "fakevllm_server", "reward_hooks")

for name in HEAVY:
    assert importlib.util.find_spec(name) is None, (
        f"{name} is installed, but the core dependencies must not include it."
    )
ENTRIES = ("web.app", "demo.command", "console.command")
for name in (*(f"fakevllm.{entry}" for entry in ENTRIES), "fakevllm_server.web.app"):
    importlib.import_module(name)
loaded = [name for name in HEAVY if name in sys.modules]
assert not loaded, f"Importing proxy and server loaded {loaded}."
for name in OURS:
    spec = importlib.util.find_spec(name)
    assert spec is not None and "site-packages" in str(spec.origin), (
        f"{name} is not imported from the wheel: {spec}"
    )
    assert (Path(str(spec.origin)).parent / "py.typed").is_file(), f"{name} has no file py.typed."
embedded = importlib.import_module("fakevllm_server.backends.embedded.demo_model")
assert (embedded.DEMO_MODEL_DIR / "model.safetensors").is_file(), (
    "The wheel has no weights of the demo's model."
)
console = importlib.import_module("fakevllm.console.page_renderer")
for file in (console.TEMPLATES / "base.html", console.STATIC / "vendor/htmx/htmx.min.js"):
    assert file.is_file(), f"The wheel lacks {file.name} of the console."
print("The wheel can be imported without", ", ".join(HEAVY))
