"""Prediction tasks for models, the next token or a reward, and the scores of reward models.

A reward model is a transformers sequence classifier, which is a causal model with a linear layer `score` in place of
the language model head. Its output for a sequence is the score of the last token that is not padding. Heads are
replaced (`replaced_forwards`) to compute outputs only where they are needed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from odc_mpi.errors import UserError

#: Entry that odc_mpi sets to True in a reward model's config.json. It means that, in training, chats end with the
#: end-of-turn token, without the whitespace that templates append.
ENDS_WITH_TURN = "reward_at_end_of_turn"


@dataclass(frozen=True)
class Task:
    """Prediction task of a model, and the corresponding classes and names in transformers and peft.

    Attributes:
        description: Kind of model, for error messages.
        auto_class: Transformers class that builds a model for this task from a configuration.
        new_head: Name of the head that only models for this task have, or None. It is trained in full, even with LoRA.
    """

    description: str
    auto_class: Any
    peft_type: str
    new_head: str | None = None

    def build(self, config: Any, setting: str, **options: Any) -> transformers.PreTrainedModel:
        """Build a model with `auto_class.from_config`, which receives `options`.

        If the task is `REWARD`, raises a `UserError` that mentions `setting` if transformers has no sequence classifier
        for `config`, or if the classifier's head is not a linear layer with one output.
        """
        if self.new_head:
            if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
                raise UserError(
                    f"{setting}: run.objective reward trains a sequence classifier of transformers, which has none for "
                    f"{config.model_type}: choose another model"
                )
            config.num_labels = 1
        module: transformers.PreTrainedModel = self.auto_class.from_config(config, trust_remote_code=False, **options)
        head = getattr(module, self.new_head or "", None)
        if self.new_head and not (isinstance(head, nn.Linear) and head.out_features == 1):
            raise UserError(
                f"{setting}: run.objective reward requires a causal model with a linear layer {self.new_head} that "
                f"scores each token, got {type(module).__name__}"
            )
        return module


CAUSAL_LM = Task("causal model", transformers.AutoModelForCausalLM, "CAUSAL_LM")
REWARD = Task("sequence classifier", transformers.AutoModelForSequenceClassification, "SEQ_CLS", "score")


def prediction_task(class_name: str) -> Task:
    """Return the task of a transformers model, given its class name. For unknown classes, return `CAUSAL_LM`."""
    return REWARD if class_name.endswith("ForSequenceClassification") else CAUSAL_LM


def set_padding(config: Any, padding: int) -> None:
    """Set the padding token and the entry `ENDS_WITH_TURN` in the configuration of a reward model."""
    config.get_text_config().pad_token_id = padding
    setattr(config, ENDS_WITH_TURN, True)


def reward_scores(module: Any, inputs: Mapping[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Score tokens with a reward model, sharded or not, in the model's dtype. One-sided if the model is sharded.

    `inputs` are the model's keyword arguments. `positions`, int64 `[K]`, selects tokens in the flattened batch. Returns
    the scores, `[K]`.
    """
    layer = getattr(module, str(REWARD.new_head))
    score, scores = layer.forward, []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        scores.append(score(hidden.flatten(0, -2)[positions])[:, 0])
        return hidden.new_zeros(*hidden.shape[:-1], 1)  # the model selects one per row; its output is not used

    with replaced_forwards({layer: head}):
        module(**inputs)
    (result,) = scores
    return result


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context manager that replaces the `forward` methods of modules. `forwards` maps each module to its new method."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, previous in before.items():
            if previous is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = previous
