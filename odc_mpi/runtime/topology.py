"""`Topology`: the ranks of a communicator, and their nodes and hosts."""

from collections import Counter

from mpi4py import MPI


class Topology:
    """Ranks of a communicator, and their nodes and hosts.

    Construction is collective: it duplicates the communicator and splits it by node.

    Attributes:
        local_rank: Index of this process on its node.
        local_size: Number of ranks on this node.
        host_rank: Index of this process on its host. It differs from `local_rank` only if MPI is configured to treat
            every rank as a separate node (MPIR_CVAR_NOLOCAL).
        host_size: Number of ranks on this host.
        node: Index of this node. Nodes are sorted by their lowest rank.
        hosts: Host name of every rank.
        layout: Host name and number of ranks of each node.
        node_ranks: Ranks of this node, by local rank.
        comm: Duplicate of the communicator.
        node_comm: Communicator of the ranks of this node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        self.node_comm = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.local_rank = self.node_comm.Get_rank()
        self.local_size = self.node_comm.Get_size()
        # The lowest rank of a node identifies it.
        leader = self.node_comm.bcast(self.rank)
        everyone = self.comm.allgather((leader, MPI.Get_processor_name()))
        self.node_ranks = self.node_comm.allgather(self.rank)
        self.hosts = [host for _, host in everyone]
        leaders = sorted({leader for leader, _ in everyone})
        self.node = leaders.index(leader)
        self.host_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        self.host_size = self.hosts.count(self.hosts[self.rank])
        self.num_nodes = len(leaders)
        ranks = Counter(leader for leader, _ in everyone)
        self.layout = [(self.hosts[leader], ranks[leader]) for leader in leaders]
