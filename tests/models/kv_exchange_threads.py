"""Chunks of one sequence as threads of one process, without the windows of `WindowKVExchange`."""

import threading

WAIT_S = 20


class Board:
    """Keys, values and their gradients by layer and chunk; reading waits for them."""

    def __init__(self):
        self.news = threading.Condition()
        self.shown, self.given = {}, {}

    def put(self, kind, key, value):
        with self.news:
            assert key not in kind, key
            kind[key] = value
            self.news.notify_all()

    def get(self, kind, key):
        with self.news:
            assert self.news.wait_for(lambda: key in kind, WAIT_S), f"{key} did not come"
            return kind[key]


class ThreadKVExchange:
    """Chunk `number` of `count`."""

    def __init__(self, board, number, count):
        self.board, self.number, self.count = board, number, count

    def publish_kv(self, layer, kv):
        if (layer, self.number) not in self.board.shown:
            self.board.put(self.board.shown, (layer, self.number), tuple(x.detach().clone() for x in kv))

    def earlier_kv(self, layer):
        for number in range(self.number):
            yield self.board.get(self.board.shown, (layer, number))

    def send_kv_grads(self, layer, grads):
        assert len(grads) == self.number
        for number, gradient in enumerate(grads):
            self.board.put(self.board.given, (layer, self.number, number), gradient)

    def accumulate_kv_grads(self, layer, grads):
        for later in range(self.number + 1, self.count):
            given = self.board.get(self.board.given, (layer, later, self.number))
            grads = (grads[0] + given[0], grads[1] + given[1])
        return grads
