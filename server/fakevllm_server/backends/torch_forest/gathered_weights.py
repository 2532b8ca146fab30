"""Run functions on modules whose weights FSDP2 divides among several workers.

FSDP2 gathers a module's weights when the module is called, and frees the gathered weights
afterwards. Code that uses parts of a model without calling the model would see only this worker's
part of the weights. `run_gathered` runs such code as FSDP2 runs a call of the module. If the module
is not divided, `run_gathered` only calls the function.

Gathering weights is a collective operation. All workers must run the same modules in the same
order, and equally often. Therefore each pass of a piece (a set of calls that go through the model
together) runs the model once and the LM head once, however many tokens the piece has.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

Result = TypeVar("Result")

METHOD = "fakevllm_run_gathered"
"""Name of the method that `enable_gathering` adds to a module."""


def enable_gathering(module: nn.Module) -> None:
    """Let `run_gathered` gather the weights of `module`, and those of all its submodules that FSDP2
    handles as modules of their own."""
    for part in module.modules():
        if isinstance(part, FSDPModule) and not hasattr(part, METHOD):
            setattr(part, METHOD, MethodType(_call, part))
            register_fsdp_forward_method(part, METHOD)


def run_gathered(module: Any, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return `function(*arguments)`, which may use the weights of `module`. If the weights are
    divided among workers, they are gathered first.

    The gradients of `module` are complete when the gradients of all tensors in `arguments` are.
    Therefore pass each tensor that needs a gradient as an argument of its own. `function` must call
    `forward_of(module)`, and not `module` itself.
    """
    method = getattr(module, METHOD, None)
    return function(*arguments) if method is None else method(function, *arguments)


def forward_of(module: Any) -> Callable[..., Any]:
    """Return the function with which a function in `run_gathered` computes `module`. A call of the
    module itself would free the gathered weights, and would gather them once for each call."""
    return module.forward if hasattr(module, METHOD) else module


def _call(_: nn.Module, function: Callable[..., Result], *arguments: Any) -> Result:
    return function(*arguments)
