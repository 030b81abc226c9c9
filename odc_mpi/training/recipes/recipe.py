"""`Recipe`: all that one training objective needs. Recipes import torch and models only when they build a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from odc_mpi.training.parsing.conflicts import Allowed, Conflicts

if TYPE_CHECKING:
    from odc_mpi.data.dataset.reader import Dataset
    from odc_mpi.models.build import MetaModel
    from odc_mpi.models.heads import Task
    from odc_mpi.observe.callback import Callback
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.inputs import Inputs
    from odc_mpi.training.loop import MinibatchSource, Objective
    from odc_mpi.training.settings import Config

#: Name of the recipe of a run whose settings name none.
DEFAULT: Literal["sft"] = "sft"
#: Settings of which recipes for preferences support only some values.
PREFERENCE_SETTINGS: Allowed = {
    "data.context_parallel": (("off",), "an answer and its prompt cannot be split over ranks"),
    "lora.dropout": ((0,), "dropout would change what is compared"),
}


@dataclass(frozen=True)
class Parts:
    """Objects that a recipe builds for a run. `source` is None if minibatches come from a prepared data set."""

    objective: "Objective"
    callbacks: "Sequence[Callback]" = ()
    source: "MinibatchSource | None" = None


class Recipe(ABC):
    """All that one training objective needs.

    Attributes:
        name: Value of `run.objective` that selects the recipe.
        section: Section with the settings of the recipe, which other recipes may share, or "" if it has none.
        settings: Dataclass of that section, or None.
        data: Kind of data: what is prepared (see `Kind` in `data.dataset.format`), or a file with prompts.
        unit: Plural noun for the samples in the data.
        allowed: Settings of which the recipe supports only some values, as in `Conflicts`.
        allowed_if_exact: Further such settings if `run.exact` is set.
        trains_routers: True if the loss can include the auxiliary loss of routers.
        claims_work: True if ranks claim work from each other, whatever `data.balance` is.
        best: Metric of evaluations that chooses the best checkpoint, and its better direction.
        counts_flops: True if the FLOPs of a step follow from the lengths of its sequences.
    """

    name: ClassVar[str]
    section: ClassVar[str] = ""
    settings: ClassVar[type | None] = None
    data: ClassVar[Literal["sequences", "pairs", "labels", "prompts"]]
    unit: ClassVar[str]
    allowed: ClassVar[Allowed] = {}
    allowed_if_exact: ClassVar[Allowed] = {}
    trains_routers: ClassVar[bool] = True
    claims_work: ClassVar[bool] = False
    best: ClassVar[tuple[str, Literal["low", "high"]]] = "eval_loss", "low"
    counts_flops: ClassVar[bool] = False

    @property
    def conflicts(self) -> Conflicts:
        """Settings of which the recipe supports only some values."""
        return Conflicts("run.objective", self.name.__eq__, self.allowed)

    @property
    def task(self) -> "Task":
        """Prediction task of the model."""
        from odc_mpi.models.heads import CAUSAL_LM

        return CAUSAL_LM

    def check(self, values: Mapping[str, Any], source: str) -> None:  # noqa: B027
        """Raise a `UserError` that names `source` if the user's settings for this recipe contradict each other."""

    def learning_rate(self, *, from_scratch: bool, has_adapters: bool) -> float:
        """Return the default learning rate: TRL's, or more for adapters or for a new model."""
        return 1e-5 if has_adapters else 1e-6

    def samples_per_step(self, config: "Config") -> int:
        """Return the number of samples per step on all ranks together."""
        return config.data.minibatch_sequences

    def describe_samples(self, config: "Config") -> str:
        """Return a description of the samples of a step, such as "pairs, 16 per step"."""
        return f"{self.unit}, {self.samples_per_step(config)} per step"

    def resolve_paths(self, config: "Config", resolve: Callable[..., Any]) -> "Config":
        """Replace the names of Hub models in the recipe's section with directories. Collective.

        `resolve` returns the directory for a path or name, given its setting. With `weights=False`, it does not
        download weights.
        """
        return config

    def compares_with_base(self, config: "Config") -> bool:
        """Return True if training reads the model in `model.path` in each start of the run."""
        return False

    def teacher(self, config: "Config") -> "MetaModel | None":
        """Build another model, which is sharded beside the trained one, without its weights, or return None."""
        return None

    def adapt_model(self, meta_model: "MetaModel", dataset: "Dataset") -> None:  # noqa: B027
        """Adapt a model without weights to a prepared data set."""

    def open_prompts(self, config: "Config", meta_model: "MetaModel", prompt_time: str | None) -> "Inputs":
        """Return the inputs of a recipe whose `data` are prompts. `prompt_time` is that of `Inputs`."""
        raise NotImplementedError(f"expected a recipe for prompts, got {self.name}")

    @abstractmethod
    def build(self, context: "RunContext") -> Parts:
        """Build the objective, the callbacks for evaluation and, for prompts, the minibatch source. Collective."""
