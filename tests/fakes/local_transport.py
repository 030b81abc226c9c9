"""N ranks in the threads of one process, and a transport between them that needs no MPI."""

import threading

import numpy as np
import torch

from odc_mpi.comm.group import Group
from odc_mpi.comm.layout import ranges_by_owner
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore, ShardStorage, Transport
from odc_mpi.comm.work import Work


class LocalGroup:
    """State shared by the ranks of a `LocalTransport`. A lost rank ends the others after `timeout_s`."""

    def __init__(self, size, timeout_s=60.0):
        self.size = size
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.board, self.transports = [None] * size, [None] * size


class LocalTransport(Transport, Group):
    """One of N ranks that live in the threads of one process.

    It is its own group, and its stores ask it for everything, so that what a test changes is in one place.
    """

    access = Access.COPY
    thread_safe = True

    def __init__(self, group, rank, param_dtype=torch.float32, reduce_dtype=torch.float32):
        self._group = group
        group.transports[rank] = self
        self.world = self.island = self
        self.rank, self.size, self.node_ranks = rank, group.size, range(group.size)
        parameters, gradients = LocalParameters(param_dtype), LocalGradients(reduce_dtype)
        for name in ("access", "start_fetch", "fetch", "release"):
            setattr(parameters, name, getattr(self, name))
        gradients.push = self.accumulate
        stores = [parameters, gradients]
        super().__init__(self, *stores, stores, thread_safe=self.thread_safe)

    @property
    def layouts(self):
        return self.parameters.layouts

    @property
    def buffers(self):
        return self.parameters.buffers

    def start_fetch(self, index, buffer):
        for owner, transport in enumerate(self._group.transports):
            start, stop = self.layouts[index].owned(owner)
            buffer[start:stop] = transport.parameters.shard(index)[: stop - start]
        return Work()

    def fetch(self, index):
        return ParameterStore.fetch(self.parameters, index)

    def release(self, fetched):
        ParameterStore.release(self.parameters, fetched)

    def accumulate(self, index, gradient, start=0):
        numel, stop = self.layouts[index].shard_numel, start + gradient.numel()
        for owner, begin, end in ranges_by_owner(numel, self.rank, start, stop):
            shard = self._group.transports[owner].gradients.shard(index)
            with self._group.lock:
                shard[begin - owner * numel : end - owner * numel] += gradient[begin - start : end - start]
        return Work()

    def require_same(self, value, what):
        pass

    def reserve(self, plan):
        plan()

    def open(self, close):
        self._group.barrier.wait()

    def gather_values(self, values):
        return self._exchange(values)

    def gradients_complete(self, report):
        return self._exchange(report)

    def norm(self, values):
        return self._exchange(values).sum(axis=0)

    def parameters_published(self):
        self.num_collectives += 1
        self._group.barrier.wait()

    def broadcast(self, tensor):
        first, *_ = self.gather(tensor.clone())
        if self.rank:
            tensor.copy_(first)

    def set_status(self, what, microbatch=0):
        pass

    def free(self, storages):
        for storage in reversed(storages):
            storage.free()

    def gather(self, value):
        self._group.board[self.rank] = value
        self._group.barrier.wait()
        everyone = list(self._group.board)
        # No rank may write the board again before all have read it.
        self._group.barrier.wait()
        return everyone

    def _exchange(self, values):
        self.num_collectives += 1
        return np.stack(self.gather(values.copy()))


class LocalShards(ShardStorage):
    def shard(self, index):
        return self._shards[index]

    def free(self):
        self._shards.clear()


class LocalParameters(LocalShards, ParameterStore):
    def allocate(self):
        self._shards = {i: torch.zeros(x.shard_numel, dtype=self.dtype) for i, x in enumerate(self.layouts)}


class LocalGradients(LocalShards, GradientStore):
    push = None  # the transport's `accumulate`

    def allocate(self):
        self._shards = {i: torch.zeros(numel, dtype=self.dtype) for i, numel in self.trainable_numels.items()}
