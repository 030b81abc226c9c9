"""Training objectives. Each is a recipe in a folder of its own, listed here."""

from typing import TYPE_CHECKING, Literal

from odc_mpi.training.recipes.dpo import DPO
from odc_mpi.training.recipes.grpo import GRPO
from odc_mpi.training.recipes.kto import KTO
from odc_mpi.training.recipes.recipe import DEFAULT, Recipe
from odc_mpi.training.recipes.reward import Reward
from odc_mpi.training.recipes.sft import SFT

__all__ = ["DEFAULT", "RECIPES", "ObjectiveName", "Recipe", "names_for", "recipe_of"]

if TYPE_CHECKING:
    from odc_mpi.training.settings import Config

#: Values of `run.objective`.
ObjectiveName = Literal["sft", "dpo", "kto", "reward", "grpo"]
#: Recipes, keyed by the value of `run.objective`.
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (SFT(), DPO(), KTO(), Reward(), GRPO())}


def recipe_of(config: "Config") -> Recipe:
    """Return the recipe that the settings select."""
    return RECIPES[config.run.objective]


def names_for(data: str) -> str:
    """Return the names of the recipes for a kind of data, such as "dpo or reward"."""
    return " or ".join(recipe.name for recipe in RECIPES.values() if recipe.data == data)
