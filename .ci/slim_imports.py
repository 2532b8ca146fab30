"""Run in an environment that has the wheel and its core dependencies only."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "ray", "vllm", "verl", "matplotlib")
OURS = ("fakevllm", "fakevllm_adapters", "fakevllm_runtime", "fakevllm_server", "reward_hooks")

for name in HEAVY:
    assert importlib.util.find_spec(name) is None, f"{name} came with the core install"
for name in ("fakevllm.web.app", "fakevllm.demo.command", "fakevllm_server.web.app"):
    importlib.import_module(name)
loaded = [name for name in HEAVY if name in sys.modules]
assert not loaded, f"loaded: {loaded}"
for name in OURS:
    spec = importlib.util.find_spec(name)
    assert spec is not None and "site-packages" in str(spec.origin), f"{name}: {spec}"
    assert (Path(str(spec.origin)).parent / "py.typed").is_file(), f"{name} is not typed"
embedded = importlib.import_module("fakevllm_server.backends.embedded.demo_model")
assert (embedded.DEMO_MODEL_DIR / "model.safetensors").is_file(), "the demo's weights are missing"
print("the wheel imports alone, without", ", ".join(HEAVY))
