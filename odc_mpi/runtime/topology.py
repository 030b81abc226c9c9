"""`Topology`: ranks, and the nodes and hosts that they are on."""

from collections import Counter

from mpi4py import MPI


class Topology:
    """Some ranks and where they are. Collective to make: a duplicate of the communicator, a split by node.

    Attributes:
        rank: This process's number among these ranks, from 0.
        size: Number of ranks.
        local_rank: This process's number on its node, from 0.
        local_size: Ranks on this node.
        host_rank: This process's number on its host, from 0. It is the local rank, unless MPI was told to take every
            rank for a node of its own (MPIR_CVAR_NOLOCAL).
        host_size: Ranks on this host.
        node: This node's number, from 0, in the order of its lowest rank.
        num_nodes: Nodes of these ranks.
        hosts: The host name of every rank.
        layout: Host name and number of ranks of each node.
        node_ranks: The ranks of this node, by local rank.
        comm: These ranks; this world's own.
        node_comm: The ranks of this node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        self.node_comm = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.local_rank = self.node_comm.Get_rank()
        self.local_size = self.node_comm.Get_size()
        # The lowest rank of each node stands for it.
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
