"""Post-training of language models over MPI. Ranks fetch parameters and push gradients with one-sided operations.

A function does not communicate unless its docstring says Collective or One-sided.
"""

from typing import Any

__version__ = "0.1.0"

#: Public names, each with the module that defines it. A module is imported when one of its names is first used, so that
#: commands that do not use MPI, such as `odc-mpi prepare`, do not start it.
_PUBLIC = {
    "train": "odc_mpi.scripting",
    "prepare": "odc_mpi.scripting",
    "World": "odc_mpi.runtime.world",
    "Islands": "odc_mpi.comm.islands.islands",
    "DiLoCo": "odc_mpi.training.islands.diloco",
    "Quorum": "odc_mpi.islands.quorum",
    "Tickets": "odc_mpi.comm.tickets",
    "CommConfig": "odc_mpi.comm.settings",
    "shard_model": "odc_mpi.api",
    "ShardedModel": "odc_mpi.shard.model",
    "Dataset": "odc_mpi.data.dataset.reader",
    "Loader": "odc_mpi.data.loader",
    "UserError": "odc_mpi.errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
