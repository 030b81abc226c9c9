"""The package bitsandbytes: its import, and its kernel for CPUs."""

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType

import torch


@functools.cache
def import_functional() -> ModuleType:
    """Import bitsandbytes.functional, which takes seconds."""
    # On import, bitsandbytes would download kernels for inference and load them. It warns if it does not.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    blocked = "kernels" not in sys.modules
    if blocked:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        if blocked:
            del sys.modules["kernels"]


@functools.cache
def cpu_kernel() -> Callable[..., torch.Tensor] | None:
    """Return the function of bitsandbytes that dequantizes on CPUs, faster than torch (benchmarks/notes/bases.md).

    The first call imports bitsandbytes. Returns None if it is not installed, or if the results are not bitwise those of
    torch: value * scale in float32, rounded once.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    functional = import_functional()
    kernel: Callable[..., torch.Tensor] = torch.ops.bitsandbytes.dequantize_4bit
    bytes_, scales = torch.arange(256, dtype=torch.uint8), torch.tensor([0.1, 0.7, 1.3, 1e-3, 3.0, 0.3, 11.0, 0.9])
    for quant_type in ("nf4", "fp4"):
        code = functional.get_4bit_type(quant_type, device="cpu")
        products = torch.cartesian_prod(code, code).view(8, 64) * scales[:, None]
        for dtype in (torch.float32, torch.bfloat16):
            found = kernel(bytes_[:, None], scales, 64, quant_type, (1, 512), dtype)
            if not found.view(8, 64).equal(products.to(dtype)):
                return None
    return kernel
