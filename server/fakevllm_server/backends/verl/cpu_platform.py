"""A platform for verl that computes on the CPU. With this platform, verl's classes can train
without an accelerator.

This module is a plugin of verl. It registers the platform when it is imported. verl imports the
modules that the environment variable VERL_USE_EXTERNAL_MODULES lists. The function
`workers_environment` sets the variable to this module.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"


def _do_nothing(*_: object, **__: object) -> None: ...


def _return_zero(*_: object, **__: object) -> int:
    return 0


def _free_and_total_memory(*_: object) -> tuple[int, int]:
    """Return the free memory and the total memory of the machine, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """Return a copy of the module `torch.cpu` that also has the functions of `torch.cuda` that verl
    calls. Functions that measure memory use return 0."""
    module = types.ModuleType("verl_cpu")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: NAME,
        get_device_name=lambda *_: NAME,
        mem_get_info=_free_and_total_memory,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        memory=types.SimpleNamespace(_set_allocator_settings=_do_nothing),
    )
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect"):
        setattr(module, name, _do_nothing)
    for name in ("reset_peak_memory_stats", "set_per_process_memory_fraction"):
        setattr(module, name, _do_nothing)
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, _return_zero)
        setattr(module, f"max_{name}", _return_zero)
    return module


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformBase):
    _module = _device_module()

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return "generic"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True if the environment variable VERL_PLATFORM selects the CPU. verl never selects
        this platform automatically."""
        return os.environ.get("VERL_PLATFORM") == NAME

    def current_device(self) -> Any:
        """Return the name of the CPU device. verl passes the returned value to `.to(device)`, where
        a number would select an accelerator."""
        return NAME

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        """Return the name of Ray's GPU resource. Even on a CPU, verl reserves a GPU for each
        worker. Therefore the private Ray cluster declares GPUs that do not exist."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
