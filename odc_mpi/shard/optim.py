"""Optimizers over slices, gradient clipping, schedules. Local arithmetic; no communication.

A rank optimizes stretches of flattened parameters. That is right for optimizers which treat every element by itself,
and wrong for those which look at a parameter as a matrix or at its norm.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

#: torch's own optimizers that update each element from that element's gradients alone.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
#: Why others are not, where it is known.
_UNSUPPORTED_REASONS = {
    "Adafactor": "it factors its second moment over a matrix's rows and columns",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it takes inner products over all parameters",
    "Lamb": "it scales by the norm of a whole parameter",
    "LARS": "it scales by the norm of a whole parameter",
    "Shampoo": "it preconditions whole matrices",
}


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer for which a slice is not enough.

    Raises:
        ValueError: It is neither one of `ELEMENTWISE` nor says of itself, by an attribute `elementwise = True`, that
            each element's update depends on that element's gradients alone.
    """
    # A subclass of one may do anything.
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    name = type(optimizer).__name__
    reason = _UNSUPPORTED_REASONS.get(
        name, "it is not known to be element-wise; if it is, set `elementwise = True` on its class"
    )
    raise ValueError(f"{name} cannot train sharded parameters, of which a rank sees flat slices: {reason}")


class StepGuard:
    """Checks every optimizer that has one of some parameters, before each of its steps.

    torch has such hooks for all optimizers of a process only. So all guards share one hook, which finds the guards that
    an optimizer concerns by its parameters: a step takes no longer where more models are open.

    Args:
        parameters: The parameters; not kept alive.
        check: Called with the optimizer.
    """

    _guarded: ClassVar[dict[int, tuple[weakref.ref[torch.Tensor], "StepGuard"]]] = {}
    _hook: ClassVar[RemovableHandle | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, parameters: Sequence[torch.Tensor], check: Callable[[optim.Optimizer], None]) -> None:
        self.check = check
        with StepGuard._lock:
            self._keys = [id(parameter) for parameter in parameters]
            StepGuard._guarded |= {id(parameter): (weakref.ref(parameter), self) for parameter in parameters}
            if StepGuard._hook is None:
                StepGuard._hook = register_optimizer_step_pre_hook(_check_step)

    def close(self) -> None:
        """Check no more. Local; a second call does nothing."""
        with StepGuard._lock:
            for key in self._keys:
                if StepGuard._guarded.get(key, (None, None))[1] is self:
                    del StepGuard._guarded[key]
            if not StepGuard._guarded and StepGuard._hook is not None:
                StepGuard._hook.remove()
                StepGuard._hook = None

    @classmethod
    def for_optimizer(cls, optimizer: optim.Optimizer) -> list["StepGuard"]:
        """Return the guards of an optimizer's parameters, each once."""
        found: dict[StepGuard, None] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            reference, guard = cls._guarded.get(id(parameter), (None, None))
            # An address may be used again.
            if guard is not None and reference is not None and reference() is parameter:
                found[guard] = None
        return list(found)


def _check_step(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for guard in StepGuard.for_optimizer(optimizer):
        guard.check(optimizer)


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares of all elements, added up in fp64."""
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64))
    return float(norms.square().sum())


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return by how much to scale gradients of a norm; 1 where nothing is to be done.

    The same small number as in `torch.nn.utils.clip_grad_norm_` keeps a norm of zero from dividing.
    """
    if not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def build_optimizer(
    kind: str,
    named: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
    *,
    weight_decay: float,
    fused: bool | None = None,
    **settings: Any,
) -> optim.Optimizer:
    """Make an optimizer over this rank's slices.

    Weight decay applies to matrices and larger; biases and the weights of norms, which have one dimension, go without,
    as is usual. A slice has one dimension itself, so the whole shapes decide.

    Args:
        kind: "adamw" or "sgd".
        named: Slices by dotted name.
        shapes: Whole shapes by dotted name.
        weight_decay: For parameters of two dimensions or more.
        fused: Whether torch's fused kernel does the step; None: of AdamW.
        **settings: For torch's optimizer: `lr`, `betas`, `eps`, `momentum`.
    """
    named = list(named)
    decayed = [p for name, p in named if len(shapes[name]) >= 2]
    others = [p for name, p in named if len(shapes[name]) < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    make = {"adamw": optim.AdamW, "sgd": optim.SGD}[kind]
    if fused is None:
        # torch's default takes three times as long on a CPU, and on a GPU temporaries as large as the parameters.
        fused = kind == "adamw"
    return make([group for group in groups if group["params"]], fused=fused or None, **settings)


def schedule_factor(kind: str, step: int, warmup_steps: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of the peak.

    Args:
        kind: "linear" or "cosine", which end at 0 after `steps`, or "constant".
        step: From 0.
        warmup_steps: Over which the rate rises in equal parts, to reach the peak right after.
        steps: Of the whole run, warm-up included.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return _SHAPES[kind](done)


#: From the part of the run after the warm-up that is done to the fraction of the peak.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
}
