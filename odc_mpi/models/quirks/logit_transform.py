"""Functions that some families apply to the output of their head: scales (Cohere, Granite) and soft caps (Gemma)."""

from dataclasses import dataclass
from math import atanh
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from odc_mpi.models.heads import replaced_forwards

#: Head outputs for which a model computes logits so that its transform can be identified.
_PROBES = (0.0, 1e-2, 1.0, -1.0, 7.5, -64.0, 1e6)


@dataclass(frozen=True)
class LogitTransform:
    """Multiplies head outputs by `scale`, soft-caps them unless `soft_cap` is None, and divides by `temperature`."""

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert the head's outputs `logits` to logits. They are float64 if the outputs are, otherwise float32."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.soft_cap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits * factor
        return torch.tanh(logits * (self.scale / self.soft_cap)) * (self.soft_cap / self.temperature)

    def backward_(self, gradient: torch.Tensor, transformed: torch.Tensor | None) -> torch.Tensor:
        """Convert, in place, the gradient of the transform's output to that of its input, and return it.

        `transformed` is the output of the transform. It may be None if there is no soft cap.
        """
        if self.soft_cap is not None:
            assert transformed is not None
            gradient *= 1.0 - (transformed * (self.temperature / self.soft_cap)) ** 2
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)

    @classmethod
    def from_model(cls, module: Any) -> "LogitTransform | None":
        """Return the transform of a transformers model, or None if the model computes its logits in another way.

        Identifies the transform by a forward pass that uses stubs for the decoder and head, and reads no parameters.
        """
        head = module.get_output_embeddings()
        probes = torch.tensor(_PROBES)[None, None]
        hidden = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 1, 1))
        decoders = {module.base_model, module.get_decoder()} - {module, None}
        forwards = {head: lambda *_, **__: probes} | {each: lambda *_, **__: hidden for each in decoders}
        try:
            with torch.no_grad(), replaced_forwards(forwards):
                logits = module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
            values = dict(zip(_PROBES, logits.double().flatten().tolist(), strict=True))
        except Exception:  # such a forward raises exceptions of many kinds
            return None
        candidates, cap = [cls(values[1.0])], values[1e6]  # tanh is 1 there
        if abs(values[1.0]) < cap:
            scale = cap * atanh(values[1.0] / cap)
            candidates.append(cls(1.0 if abs(scale - 1.0) < 1e-5 else scale, cap))
        same = (each for each in candidates if torch.allclose(each(probes), logits.float(), rtol=1e-5, atol=0))
        return next((transform for transform in same if transform.scale > 0), None)
