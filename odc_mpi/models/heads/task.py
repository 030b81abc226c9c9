"""Tasks of models: predict the next token, or the reward of an answer. Transformers has a class for each of both.

A reward model is a causal model with a linear layer `score` in place of the language model head, as in the
sequence classifiers of transformers. Their output is the score of the last token that is not padding.
"""

from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from odc_mpi.errors import UserError

#: Entry of config.json, if the answers on which a reward model was trained end with their end-of-turn token.
ENDS_WITH_TURN = "reward_at_end_of_turn"


@dataclass(frozen=True)
class Task:
    """Prediction of a model, with the classes of transformers that make it.

    Attributes:
        description: Words for error messages.
        suffix: End of the names of the classes.
        auto_class: Class of transformers that builds a model from a configuration.
        peft_type: Name of the task in peft.
        new_head: Name of the head, if models of other tasks have no weights for it. It is trained in full.
    """

    description: str
    suffix: str
    auto_class: Any
    peft_type: str
    new_head: str | None = None

    def configure(self, config: Any, setting: str) -> None:
        """Set the entries of a configuration on which the head depends.

        Raises `UserError`, which names `setting`, if transformers has no such model of the family.
        """
        if self is REWARD:
            if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
                raise UserError(
                    f"{setting}: expected a family with a sequence classifier in transformers, which run.objective "
                    f"reward trains, got {config.model_type}, which has none"
                )
            config.num_labels = 1

    def check(self, module: nn.Module, setting: str) -> None:
        """Raise `UserError`, which names `setting`, unless the head of a model is a linear layer with one output."""
        head = self.new_head and getattr(module, self.new_head, None)
        if self.new_head and not (isinstance(head, nn.Linear) and head.out_features == 1):
            raise UserError(
                f"{setting}: expected a causal model whose classifier is a linear layer, {self.new_head}, of each "
                f"token, got {type(module).__name__}: run.objective reward does not support it"
            )


CAUSAL_LM = Task("causal model", "", transformers.AutoModelForCausalLM, "CAUSAL_LM")
REWARD = Task(
    "sequence classifier",
    "ForSequenceClassification",
    transformers.AutoModelForSequenceClassification,
    "SEQ_CLS",
    "score",
)


def task_of(class_name: str) -> Task:
    """Return the task of a class of transformers."""
    return REWARD if class_name.endswith(REWARD.suffix) else CAUSAL_LM


def set_padding(config: Any, padding: int) -> None:
    """Set the padding token of a reward model, which transformers skips to find the last token of an answer.

    Also record that answers end with their end-of-turn token, without the white space that templates append.
    """
    config.get_text_config().pad_token_id = padding
    setattr(config, ENDS_WITH_TURN, True)
