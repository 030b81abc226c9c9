"""Who may import whom: the rooms, top to bottom, never upwards."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "odc_mpi"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: What each room may import of the others. A module named in full is allowed alone.
MAY_SEE = {
    "cli": {
        *("bench", "train", "checkpoint", "data", "comm", "doctor"),
        *("job_command", "bench_command", "ranks", "launcher", "limits", "imports", "arguments"),
    },
    "bench_command": {"bench", "train", "comm", "ranks", "launcher", "imports", "arguments"},
    "ranks": {"comm", "limits"},
    "arguments": {"checkpoint.command_line", "job_command"},
    "__main__": {"cli"},
    "bench": {"train", "checkpoint", "api", "data", "shard", "comm", "native", "launcher"},
    "train": {"api", "checkpoint", "data", "shard", "comm.world", "comm.tickets"},
    "checkpoint": {"shard"},
    "doctor": {"comm.report", "comm.decision", "comm.pmi", "comm.cache", "comm.gpu", "launcher"},
    "job": set(),
    "job_command": {"job", "comm.pmi", "train.config"},
    "launcher": set(),
    "limits": set(),
    "imports": set(),
    "api": {"shard", "comm"},
    "shard": {"comm.transport", "comm.buffers", "comm.world", "native"},
    "comm": {"limits", "native"},
    "data": set(),
    "native": set(),
    "errors": set(),
    "__init__": {"errors"},
}
#: These know nothing of the project but `errors`, not even their own room.
ALONE = {
    *("shard.layout", "data.cost", "data.partition", "data.stdlib", "comm.deadline", "comm.lateness"),
    *(
        "checkpoint.hyperslabs",
        "comm.buffers",
        "comm.report",
        "comm.pmi",
        "comm.gpu",
        "bench.launch",
        "bench.measure",
        "bench.events",
    ),
}
#: These see of their own room only this: no MPI.
SEE_ALSO = {
    "comm.decision": {"comm.report", "comm.device_decision"},
    "comm.device_decision": {"comm.report"},
    "comm.cache": {"comm.report"},
}
#: Libraries that only these may import.
KEPT_IN = {
    "mpi4py": {"comm"},
    "torch.distributed": {"bench.gloo", "bench.fsdp", "bench.dcp"},
    "h5py": {"data.dataset", "checkpoint"},
    "cupy": {"comm", "native"},
    "transformers": {"train.models", "train.weights", "train.attention", "data.prepare"},
    "safetensors": {"train.weights", "checkpoint.export"},
    "rich": {"cli", "bench.tables", "bench.gpu_tables", "doctor", "train.metrics", "data.prepare"},
    "yaml": {"train.dialect"},
    "matplotlib": {"bench.pictures"},
}


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(path):
    """All imported modules, those inside functions too; names of this package without its own name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module.split(".")[0] == "odc_mpi":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(module, places):
    return any(module == place or module.startswith(place + ".") for place in places)


def own_modules():
    return {f"odc_mpi.{name_of(path)}".removesuffix(".__init__") for path in MODULES} | {"odc_mpi"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows_run_one_way(path):
    own = name_of(path)
    room = own.split(".")[0]
    allowed = MAY_SEE[room] | {"errors"} | (set() if own in ALONE else SEE_ALSO.get(own, {room}))
    for module in imports_of(path):
        if module in own_modules() and module != "odc_mpi":
            target = module.removeprefix("odc_mpi.")
            # A room's name alone is its docstring: nothing comes with it.
            assert is_in(target, allowed) or any(place.startswith(target + ".") for place in allowed), (
                f"{own} may not import {module}"
            )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_stay_in_their_rooms(path):
    own = name_of(path)
    for module in imports_of(path):
        library = module.split(".")[0]
        if library in KEPT_IN:
            assert is_in(own, KEPT_IN[library]), f"{own} may not import {library}"


@pytest.mark.parametrize("module", ["lengths", "scenario", "events", "simulate", "simulate_command"])
def test_the_simulator_knows_no_mpi(module):
    seen, due = set(), {f"odc_mpi.bench.{module}"}
    while due:
        found = due.pop()
        path = PACKAGE.parent / (found.replace(".", "/") + ".py")
        assert not found.startswith(("mpi4py", "odc_mpi.comm", "torch"))
        if found not in seen and path.is_file():
            due |= set(imports_of(path))
        seen.add(found)
    assert "numpy" in seen or module == "events"


def test_the_rules_see_a_breach(tmp_path):
    breach = tmp_path / "breach.py"
    breach.write_text("def f():\n    from odc_mpi.comm import window\n    import mpi4py.MPI\n")
    assert set(imports_of(breach)) == {"odc_mpi.comm", "odc_mpi.comm.window", "mpi4py.MPI"}
    assert not is_in("comm.window", MAY_SEE["shard"])
