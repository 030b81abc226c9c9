"""An objective is one recipe: nothing else in the package asks which objective a run has."""

import ast
from pathlib import Path
from typing import get_args

from odc_mpi.training.recipes import DEFAULT, RECIPES, ObjectiveName
from odc_mpi.training.settings import all_settings

PACKAGE = Path(__file__).parents[2] / "odc_mpi"
RECIPE_FOLDER = PACKAGE / "training" / "recipes"
#: Uses of an equal word that is no objective.
ALLOWED = {"report/run_report.py": {"reward"}}  # a metric


def test_each_value_of_the_setting_is_a_recipe():
    assert set(get_args(ObjectiveName)) == RECIPES.keys() and DEFAULT in RECIPES
    sections = {recipe.section for recipe in RECIPES.values() if recipe.settings}
    assert sections <= {name.partition(".")[0] for name in all_settings()}


def decisive_words(tree):
    """The texts in comparisons, keys of dictionaries, patterns of `match`, and `Literal`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            parts = [node.slice]
        else:
            continue
        for part in parts:
            yield from (each.value for each in ast.walk(part) if isinstance(each, ast.Constant))


def test_no_other_module_asks_for_an_objective():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if RECIPE_FOLDER not in path.parents:
            words = {word for word in decisive_words(ast.parse(path.read_text())) if word in RECIPES}
            name = str(path.relative_to(PACKAGE))
            if words - ALLOWED.get(name, set()):
                found[name] = words
    assert not found


def test_only_the_settings_import_a_single_recipe_and_no_recipe_imports_another():
    for path in PACKAGE.rglob("*.py"):
        imported = {
            node.module.split(".")[3]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("odc_mpi.training.recipes.")
        }
        folder = path.parent.name if RECIPE_FOLDER in path.parents[1:] else ""
        if str(path.relative_to(PACKAGE)) not in ("training/settings.py", "training/recipes/__init__.py"):
            assert imported <= {"recipe", folder}, path


def test_no_other_module_reads_the_section_of_a_recipe():
    sections = {recipe.section for recipe in RECIPES.values() if recipe.section}
    for path in PACKAGE.rglob("*.py"):
        if RECIPE_FOLDER not in path.parents:
            read = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            keys = {word for word in decisive_words(ast.parse(path.read_text())) if word in sections}
            assert not (read & sections) and not keys - ALLOWED.get(str(path.relative_to(PACKAGE)), set()), path
