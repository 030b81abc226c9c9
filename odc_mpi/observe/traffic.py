"""How many bytes a rank fetches and pushes in a minibatch, from and to its node and others."""

from typing import ClassVar

from odc_mpi.observe.metrics import Entry
from odc_mpi.observe.participant import Participant, Step
from odc_mpi.shard import model as sharded
from odc_mpi.shard.minibatch import TRAFFIC


class TrafficReport(Participant):
    """Reports means over the ranks. What an evaluation fetches counts to the minibatch after it."""

    summary: ClassVar = {key: Entry(key, "per_step") for key in ("bytes_fetched", "bytes_pushed", *TRAFFIC)}

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Report. Local."""
        means = {name: float(told.per_rank(name).mean()) for name in TRAFFIC}
        for key in ("bytes_fetched", "bytes_pushed"):
            step.metrics[key] = means[f"{key}_same_node"] + means[f"{key}_other_nodes"]
        step.metrics |= means
