"""Reward models, and the section `reward` of the settings, with the names and defaults of TRL's `RewardConfig`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.setting_types import NOT_NEGATIVE
from odc_mpi.training.recipes.recipe import PREFERENCE_SETTINGS, Parts, Recipe

if TYPE_CHECKING:
    from odc_mpi.data.dataset.reader import Dataset
    from odc_mpi.models.build import MetaModel
    from odc_mpi.models.heads import Task
    from odc_mpi.training.context import RunContext


@dataclass(frozen=True)
class RewardConfig:
    """Settings for reward models."""

    center_rewards_coefficient: Annotated[
        float | None, "factor of a loss that centers rewards, such as 0.01; null: none", NOT_NEGATIVE
    ] = None


class Reward(Recipe):
    """Training of a reward model on pairs of a chosen and a rejected answer."""

    name = section = "reward"
    settings = RewardConfig
    data = "pairs"
    unit = "pairs"
    allowed = PREFERENCE_SETTINGS
    trains_routers = False

    @property
    @override
    def task(self) -> "Task":
        from odc_mpi.models.heads import REWARD

        return REWARD

    @override
    def learning_rate(self, *, from_scratch: bool, has_adapters: bool) -> float:
        return 1e-3 if has_adapters else 1e-4

    @override
    def adapt_model(self, meta_model: "MetaModel", dataset: "Dataset") -> None:
        """Set the padding token to the tokenizer's padding or end-of-sequence token, as TRL does, or to the model's."""
        from odc_mpi.data.tokenizer import load_files, tokenizer_files
        from odc_mpi.models.heads import set_padding

        files = tokenizer_files(Path(dataset.path))
        tokenizer = load_files(files, Path(dataset.path), "data.path") if files else None
        candidates = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        candidates.append(meta_model.module.config.get_text_config().pad_token_id)
        padding = next((each for each in candidates if each is not None and each < meta_model.vocab_size), None)
        if padding is None:
            raise UserError(
                f"data.path: run.objective reward requires a padding token, but the tokenizer in {dataset.path} has no "
                "pad_token and no eos_token: set model.config.pad_token_id"
            )
        set_padding(meta_model.module.config, padding)

    @override
    def build(self, context: "RunContext") -> Parts:
        from odc_mpi.training.evaluation import held_out_pass
        from odc_mpi.training.preferences.pairs import PairEvaluator, PairObjective
        from odc_mpi.training.recipes.reward.scorer import RewardScorer

        config, inputs, model = context.config, context.inputs, context.model
        model.eval()  # disables dropout, as in TRL
        scorer = RewardScorer(model.module, inputs.model.packing.packs, config.reward)
        held_out = held_out_pass(context)
        return Parts(PairObjective(scorer), [PairEvaluator(config.run, model, held_out, scorer)] if held_out else [])
