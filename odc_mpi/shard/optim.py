"""Optimizers that can train slices, and learning rate schedules. This module does not communicate.

Each rank optimizes only slices of flattened parameters. This is correct for element-wise optimizers, but not for those
that use the rows and columns of a matrix or the norm of a parameter.
"""

import math
from collections.abc import Callable

from torch import optim

#: PyTorch optimizers that compute the update of an element only from the gradients of that element.
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
#: Explanations of why other optimizers are not element-wise, by class name.
_UNSUPPORTED_REASONS = {
    "Adafactor": "it factors its second moment over a matrix's rows and columns",
    "Muon": "it orthogonalizes whole matrices",
    "LBFGS": "it takes inner products over all parameters",
    "Lamb": "it scales by the norm of a whole parameter",
    "LARS": "it scales by the norm of a whole parameter",
    "Shampoo": "it preconditions whole matrices",
}


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Raise ValueError unless an optimizer's class is in `ELEMENTWISE` or its `elementwise` attribute is True."""
    # Not isinstance, because a subclass need not be element-wise.
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    name = type(optimizer).__name__
    reason = _UNSUPPORTED_REASONS.get(
        name, "it is not known to be element-wise; if it is, set `elementwise = True` on its class"
    )
    raise ValueError(f"{name} cannot train sharded parameters, because a rank has only flat slices of them: {reason}")


def schedule_factor(
    kind: str, step: int, warmup_steps: int, steps: int, min_ratio: float = 0.0, decay_ratio: float = 1.0
) -> float:
    """Return the learning rate of `step`, counted from 0, as a fraction of the peak learning rate.

    The learning rate rises linearly during the first `warmup_steps` steps and reaches its peak in the next step. If
    `kind` is "constant", it then stays at the peak. If it is "linear" or "cosine", the learning rate then falls and
    would reach `min_ratio` at step `steps`. If it is "warmup_stable_decay", the learning rate falls to `min_ratio` like
    a cosine in the last `decay_ratio * steps` steps, as in `transformers.get_wsd_schedule`. `steps` includes warmup.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    first = warmup_steps
    if kind == "warmup_stable_decay":
        first = max(warmup_steps, steps - math.ceil(decay_ratio * steps))
    done = min(1.0, max(0, step - first) / max(1, steps - first))
    return min_ratio + (1.0 - min_ratio) * _SHAPES[kind](done)


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


#: Fraction of the peak as a function of the completed fraction of the decay.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": _cosine,
    "constant": lambda done: 1.0,
    "warmup_stable_decay": _cosine,
}
