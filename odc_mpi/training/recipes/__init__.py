"""Training objectives. Each is a recipe in a folder of its own, listed here."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.training.recipes.distill import Distill
from odc_mpi.training.recipes.dpo import DPO
from odc_mpi.training.recipes.grpo import GRPO
from odc_mpi.training.recipes.kto import KTO
from odc_mpi.training.recipes.recipe import DEFAULT, Recipe
from odc_mpi.training.recipes.reward import Reward
from odc_mpi.training.recipes.sft import SFT

__all__ = ["DEFAULT", "RECIPES", "ObjectiveName", "Recipe", "names_for", "recipe_of", "select_recipe"]

if TYPE_CHECKING:
    from odc_mpi.training.settings import Config

#: Values of `run.objective`.
ObjectiveName = Literal["sft", "dpo", "kto", "reward", "grpo", "distill"]
#: Recipes, keyed by the value of `run.objective`.
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (SFT(), DPO(), KTO(), Reward(), GRPO(), Distill())}


def recipe_of(config: "Config") -> Recipe:
    """Return the recipe that the settings select."""
    return RECIPES[config.run.objective]


def select_recipe(values: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe that the user's settings, `values`, select.

    Raises a `UserError` that names `source` if they change a setting in a section that it does not use.
    """
    selected = RECIPES[values.get("run.objective", DEFAULT)]
    for recipe in RECIPES.values():
        if not recipe.settings or recipe.section == selected.section:
            continue
        defaults = {f"{recipe.section}.{item.name}": item.default for item in fields(recipe.settings)}
        changed = [key for key in values if key in defaults and values[key] != defaults[key]]
        if changed:
            names = " or ".join(each.name for each in RECIPES.values() if each.section == recipe.section)
            raise UserError(f"{source}: {changed[0]} requires run.objective {names}: set that, or remove {changed[0]}")
    return selected


def names_for(data: str) -> str:
    """Return the names of the recipes for a kind of data, such as "dpo or reward"."""
    return " or ".join(recipe.name for recipe in RECIPES.values() if recipe.data == data)
