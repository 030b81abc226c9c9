"""Who may import whom: the folders, bottom to top, never upwards; few files per folder; an objective is one recipe."""

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

from odc_mpi.training.recipes import DEFAULT, RECIPES, ObjectiveName
from odc_mpi.training.settings import all_settings

PACKAGE = Path(__file__).parents[1] / "odc_mpi"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parent
BENCHMARKS = PACKAGE.parent / "benchmarks"

#: Modules at the root that know nothing of the project, and that every folder may import.
ROOT = {"errors", "files", "formatting", "hdf5_file", "hub", "setting_types", "yaml_dialect"}
#: What each folder may import of the others, besides `ROOT`. A module named in full is allowed alone.
MAY_SEE = {
    **{module: set() for module in ROOT},
    "runtime": set(),
    "comm": {"runtime", "islands"},
    "shard": {
        *("comm.settings", "comm.group", "comm.transport", "comm.work", "comm.traffic", "comm.buffers"),
        *("comm.kernels", "comm.layout"),
    },
    "checkpoint": {"shard", "islands.run_dir", "data.tokenizer", "data.encoding"},
    "probe": {"runtime", "comm"},
    "islands": set(),
    "api": {"probe", "shard", "comm", "runtime"},
    "data": set(),
    "models": {"shard", "data", "checkpoint", "runtime.world"},
    "observe": {"islands.norms", "islands.run_dir", "runtime", "data", "shard"},
    "training": {
        *("api", "checkpoint", "data", "islands", "models", "observe", "rollout", "shard", "runtime"),
        *("comm.work_queue", "comm.context_parallel.kv_windows", "comm.context_parallel.kv_exchange", "comm.tickets"),
        *("comm.settings", "comm.device.device", "comm.device.device_memory", "probe.decision"),
        *("comm.islands.islands", "comm.islands.merges", "comm.buddies"),
    },
    "rollout": {"data", "models"},
    "generation": {"api", "comm.tickets", "shard.model", "runtime", "data", "models", "checkpoint", "rollout"},
    "scripting": {"runtime", "data", "observe", "training"},
    "jobs": set(),
    # Without MPI and torch.
    "supervisor": {"observe.metrics", "training.rundir.run_dir_lock", "training.rundir.records"},
    "simulate": {"data"},
    "report": {"simulate", "data", "observe.metrics", "islands.run_dir"},
    "cli": {
        *("runtime", "probe", "data", "checkpoint", "models", "observe", "training", "generation"),
        *("jobs", "simulate", "report", "supervisor"),
    },
    "__main__": {"cli"},
    "__init__": set(),
}
#: These know nothing of the project but `ROOT`, not even their own folder.
ROOT_ONLY = {
    *("comm.layout", "comm.buffers", "data.plan.cost", "data.plan.partition", "data.readers.stdlib"),
    *("runtime.deadline", "runtime.lateness", "runtime.start.pmi"),
    *("probe.report", "probe.gpu", "simulate.events"),
}
#: These may import only this from their own folder: no MPI.
SEE_ALSO = {
    "probe.decision": {"probe.report", "probe.device_decision"},
    "probe.device_decision": {"probe.report"},
    "probe.cache": {"probe.report"},
}
#: Libraries that only these may import.
KEPT_IN = {
    "mpi4py": {"runtime", "probe", "comm"},
    "torch.distributed": set(),
    "huggingface_hub": {"hub", "models.export"},
    "h5py": {"hdf5_file", "data.dataset", "checkpoint"},
    "cupy": {"comm"},
    "transformers": {"models", "data.tokenizer", "data.chat", "rollout", "generation"},
    "peft": {"models.adapters.add"},
    "safetensors": {"models.weights.safetensors_files", "models.adapters.read", "models.export"},
    "rich": {
        *("cli", "probe.doctor", "observe.terminal", "observe.watch", "training.start.dry_run"),
        *("data.prepare", "data.show", "report.page"),
    },
    "matplotlib": {"report.plots", "report.svg"},
    "yaml": {"yaml_dialect"},
    **{name: {"observe.trackers"} for name in ("accelerate", "mlflow", "comet_ml")},
    # Programs import the package, never the other way round.
    **{path.stem: set() for path in BENCHMARKS.glob("*.py")},
}
#: Undocumented parts of transformers and peft, and the modules that use them: docs/architecture.md says what for.
PRIVATE = {
    "_attn_implementation": {"models.decoding", "models.configuration"},
    "_supports_sdpa": {"models.decoding", "models.families"},
    "_supports_attention_backend": {"models.families"},
    "_no_split_modules": {"shard.partition", "models.compiled"},
    "_init_weights": {"models.weights.random_init"},
    "get_model_conversion_mapping": {"models.weights.conversion"},
    "rename_source_key": {"models.weights.conversion"},
    "revert_weight_conversion": {"models.weights.conversion"},
    "_keys_to_ignore_on_save": {"models.weights.conversion"},
    "past_key_values": {"models.quirks.caches"},
    "_check_received_keys": {"models.configuration"},
    "_disable_adapters": {"training.reference_policy"},
}
#: Files of a folder, besides `__init__`: more are split into folders.
MAX_FILES = 13


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


#: All nodes of the syntax trees, by module.
NODES = {module_name(path): list(ast.walk(ast.parse(path.read_text()))) for path in MODULES}
OWN = {f"odc_mpi.{name}".removesuffix(".__init__") for name in NODES}
#: Uses of the word of an objective that is none.
ALLOWED = {"report.run_report": {"reward"}}  # a metric


def find_imports(nodes):
    """All imported modules, those inside functions too; names of this package without its own name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield node.module
            if node.module.split(".")[0] == "odc_mpi":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(module, places):
    return any(module == place or module.startswith(place + ".") for place in places)


def may_import(importer, module):
    """Return whether a module of the package may import another module."""
    folder = importer.split(".")[0]
    allowed = MAY_SEE[folder] | ROOT | (set() if importer in ROOT_ONLY else SEE_ALSO.get(importer, {folder}))
    target = module.removeprefix("odc_mpi.")
    # A folder's name alone is its docstring: nothing else is imported.
    in_order = module not in OWN or is_in(target, allowed) or any(place.startswith(target + ".") for place in allowed)
    return in_order and all(is_in(importer, places) for name, places in KEPT_IN.items() if is_in(module, {name}))


def test_imports_go_one_way_and_libraries_are_imported_in_their_folders_only():
    imports = [(importer, module) for importer, nodes in NODES.items() for module in find_imports(nodes)]
    assert [pair for pair in imports if not may_import(*pair) and pair[1] != "odc_mpi"] == []
    breach = list(ast.walk(ast.parse("def f():\n    from odc_mpi.comm.windows import rma\n    import mpi4py.MPI\n")))
    found = {"odc_mpi.comm.windows", "odc_mpi.comm.windows.rma", "mpi4py.MPI"}
    assert set(find_imports(breach)) == found and not any(may_import("shard.model", module) for module in found)


def test_folders_are_small():
    for root, limit in ((PACKAGE, MAX_FILES), (TESTS, MAX_FILES + 1)):
        names = ("__init__.py", "conftest.py")
        sizes = Counter(path.parent for path in root.rglob("*.py") if path.name not in names)
        assert {folder: size for folder, size in sizes.items() if size > limit} == {}
    assert [path for path in MODULES if not (path.parent / "__init__.py").is_file()] == []


def test_names_of_tests_are_unique():
    """pytest takes modules of the same name in two folders for one, as the folders are no packages."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_private_parts_of_transformers_and_peft_are_used_in_the_listed_modules():
    used = {name: set() for name in PRIVATE}
    for module, nodes in NODES.items():
        for node in nodes:
            for word in (getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "value", None)):
                if isinstance(word, str) and word in used:
                    used[word].add(module)
    assert used == PRIVATE
    table = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("## Private parts")[2]
    for name, modules in PRIVATE.items():
        row = next(line for line in table.splitlines() if name in line)
        assert all(f"`{module.replace('.', '/')}.py`" in row for module in modules), name


def decisive_words(nodes):
    """The texts in comparisons, keys of dictionaries, patterns of `match`, and `Literal`."""
    for node in nodes:
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        parts += filter(None, node.keys) if isinstance(node, ast.Dict) else []
        parts += [node.value] if isinstance(node, ast.MatchValue) else []
        if isinstance(node, ast.Subscript) and "Literal" in (getattr(node.value, name, "") for name in ("id", "attr")):
            parts.append(node.slice)
        yield from (each.value for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant))


def test_an_objective_is_one_recipe_and_nothing_else_asks_which_objective_a_run_has():
    assert set(get_args(ObjectiveName)) == RECIPES.keys() and DEFAULT in RECIPES
    sections = {recipe.section for recipe in RECIPES.values() if recipe.settings}
    assert sections <= {name.partition(".")[0] for name in all_settings()}
    sections = {recipe.section for recipe in RECIPES.values() if recipe.section}
    for module, nodes in NODES.items():
        if not module.startswith("training.recipes."):
            assert sections.isdisjoint(node.attr for node in nodes if isinstance(node, ast.Attribute)), module
            found = {*decisive_words(nodes)} & {*sections, *RECIPES}
            assert not found - ALLOWED.get(module, set()), module


def test_only_the_settings_import_a_single_recipe_and_no_recipe_imports_another():
    for module, nodes in NODES.items():
        if module not in ("training.settings", "training.recipes.__init__"):
            names = [(node.module or "").split(".") for node in nodes if isinstance(node, ast.ImportFrom)]
            imported = {name[3] for name in names if name[1:3] == ["training", "recipes"] and len(name) > 3}
            assert imported <= {"recipe", "rollouts", module.split(".")[-2] if module.count(".") > 2 else ""}, module
