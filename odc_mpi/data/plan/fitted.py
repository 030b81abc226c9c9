"""A cost model that is fitted to the measured times of microbatches during a run.

The model is `seconds = slowness * (constant + linear * tokens + quadratic * squares)`, where `slowness` depends on the
rank, and `squares` is the sum of squared sequence lengths. Each rank observes its own microbatches (`observe`), and
sums the observations in a row of numbers (`report`). At the end of a minibatch, ranks exchange their rows, and every
rank fits the same model to the same rows (`update`). These methods do not communicate.

`update` uses only the four basic operations in a fixed order, and no matrix products from libraries, so ranks on
different processors get bitwise identical costs. With different costs, their plans would differ, and sequences would be
lost or trained on twice.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.cost import CostModel

ReportRows = npt.NDArray[np.float64]
_Vector = tuple[float, float, float]

#: Length of a row: the upper triangle of the products of the features, the features times the seconds, the number of
#: microbatches, the sum of the chunk factors, and the number of chunks.
ROW_LENGTH = 12
_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
#: Factor applied to the weight of an observation after each minibatch. The weight halves in 30 minibatches, enough to
#: average out noise, yet few enough to follow lasting changes. A literal, since libraries may differ in the last bit.
DECAY = 0.97716
MIN_OBSERVATIONS = 16  # weighted number of microbatches on all ranks that a fit requires
HISTORY = 256  # latest microbatches of this rank from which the median ratio of time to cost is computed
#: Weight of the prior relative to that of an observation: the variance of times divided by that of the prior. The
#: relative standard deviations are assumed to be 0.1 for times and 1 for the prior.
PRIOR_WEIGHT = 0.01
#: Weight of the prior chunk factor, as a number of chunks, and maximum factor of a single chunk.
PRIOR_CHUNKS, MAX_CHUNK_FACTOR = 8, 3.0
NUM_ALTERNATIONS = 4  # of fits of speeds and coefficients; a few are enough, because they start from the last fit


class FittedCostModel:
    """Cost model whose coefficients are fitted to the times of microbatches during a run.

    The fit minimizes relative errors, so short microbatches matter as much as long ones. The more the time of a
    microbatch exceeds the expected time, the smaller its weight. The expected time is the current cost times this
    rank's median ratio of time to cost. Ranks may have different speeds. Until there is enough data, the cost model is
    `prior`, which may be in any unit. If the data does not determine the coefficients, for example because all lengths
    are equal, their ratios are those in `prior`.

    Attributes:
        cost: Current cost model, equal on all ranks: first the prior, then a fit in seconds for a rank of mean speed.
    """

    def __init__(self, prior: CostModel) -> None:
        self._prior = self.cost = prior
        self._observations: deque[tuple[float, float, float]] = deque(maxlen=HISTORY)  # tokens, squares, seconds
        self._new: list[tuple[float, float, float]] = []
        self._new_chunks: list[tuple[int, int, float]] = []  # begin, end, seconds
        self._rows: ReportRows = np.zeros((0, ROW_LENGTH))

    def observe(self, lengths: npt.ArrayLike, seconds: float) -> None:
        """Record the time that this rank took for a microbatch, whose sequence lengths in tokens are `lengths`, [n].

        Does nothing if `lengths` is empty or `seconds` is not a finite number above 0.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        if tokens.size and math.isfinite(seconds) and seconds > 0:
            observation = (float(tokens.sum()), float((tokens * tokens).sum()), float(seconds))
            self._observations.append(observation)
            self._new.append(observation)

    def observe_chunk(self, begin: int, end: int, seconds: float) -> None:
        """Record the time that this rank took for a chunk that consists of the tokens `begin:end` of a sequence.

        `seconds` must exclude time spent waiting for other chunks. Does nothing if it is not a finite number above 0.
        """
        if begin < end and math.isfinite(seconds) and seconds > 0:
            self._new_chunks.append((begin, end, float(seconds)))

    def report(self) -> ReportRows:
        """Return this rank's row, float64 [ROW_LENGTH]: sums over its observations since the last report."""
        row = np.zeros(ROW_LENGTH)
        if self._observations:  # else the speed of this rank is unknown
            usual = float(np.median([time / self._estimate(*features) for *features, time in self._observations]))
            for tokens, squares, seconds in self._new:
                # The unit is the expected time, so that each microbatch has the same weight, or the time itself if that
                # is longer. Thus, an outlier of 100 times the expected time has a weight of 1 / 10,000.
                unit = max(usual * self._estimate(tokens, squares), seconds)
                time, features = seconds / unit, (1.0 / unit, tokens / unit, squares / unit)
                row[:6] += [features[i] * features[j] for i, j in _PAIRS]
                row[6:9] += [feature * time for feature in features]
                row[9] += 1.0
            for begin, end, seconds in self._new_chunks:
                part = usual * replace(self.cost, chunk_factor=1.0).chunk(begin, end)
                factor = (seconds - usual * self.cost.constant) / part if part > 0 else 1.0
                row[10:] += [min(max(factor, 0.0), MAX_CHUNK_FACTOR), 1.0]
        self._new.clear()
        self._new_chunks.clear()
        return row

    def update(self, reports: npt.ArrayLike) -> None:
        """Fit the cost model to new rows from all ranks and, with lower weights, to earlier rows.

        `reports`, float64 `[size, ROW_LENGTH]`, contains one row per rank, as returned by `report`.
        """
        rows = np.asarray(reports, dtype=np.float64)
        assert rows.ndim == 2 and rows.shape[1] == ROW_LENGTH, f"reports of shape {rows.shape}"
        if len(self._rows) != len(rows):  # another number of ranks: equal shares of the sum, scaled to mean speed
            total = _at_mean_speed(self._rows, _numbers(self.cost)).sum(axis=0) if len(self._rows) else 0.0
            self._rows = np.zeros(rows.shape) + total / len(rows)
        self._rows = self._rows * DECAY + rows
        if math.fsum(self._rows[:, 9].tolist()) >= MIN_OBSERVATIONS:
            self.cost = _fit(self._rows, self.cost, self._prior)
        self._fit_chunks()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the fit as floats and lists. The state is the same on every rank."""
        return {"cost": _numbers(self.cost), "rows": self._rows.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fit from the `state_dict()` of any number of ranks, and drop this rank's observations."""
        constant, linear, quadratic = state["cost"]
        self.cost = replace(self._prior, linear=linear, quadratic=quadratic, constant=constant)
        self._rows = np.array(state["rows"], dtype=np.float64).reshape(-1, ROW_LENGTH)
        self._fit_chunks()
        self._observations.clear()
        self._new.clear()
        self._new_chunks.clear()

    def _fit_chunks(self) -> None:
        """Set the chunk factor to the weighted mean of the observations and the prior."""
        total, count = (math.fsum(self._rows[:, column].tolist()) for column in (10, 11))
        if count > 0:
            factor = (PRIOR_CHUNKS * self._prior.chunk_factor + total) / (PRIOR_CHUNKS + count)
            self.cost = replace(self.cost, chunk_factor=max(1.0, factor))

    def _estimate(self, tokens: float, squares: float) -> float:
        cost = self.cost
        estimate = cost.constant + cost.linear * tokens + cost.quadratic * squares
        return estimate if estimate > 0 else 1.0


def _numbers(cost: CostModel) -> _Vector:
    return cost.constant, cost.linear, cost.quadratic


def _fit(rows: ReportRows, start: CostModel, prior: CostModel) -> CostModel:
    """Alternate between fitting the speeds of the ranks and fitting the coefficients."""
    coefficients, before = _numbers(start), _numbers(prior)
    for _ in range(NUM_ALTERNATIONS):
        even = _at_mean_speed(rows, coefficients)
        coefficients = _solve([math.fsum(column) for column in even.T.tolist()], before)
    constant, linear, quadratic = coefficients
    if not linear + quadratic > 0:
        return start
    return replace(start, linear=linear, quadratic=quadratic, constant=constant)


def _at_mean_speed(rows: ReportRows, coefficients: _Vector) -> ReportRows:
    """Scale the features in each row by its rank's slowness under these coefficients, as if all speeds were equal."""
    # Least squares estimate of a factor on all times, without matrix products (see the module's docstring).
    moment = _times(rows[:, 6:9].T, coefficients)
    power = _quadratic_form(rows[:, :6].T, coefficients)
    known = (moment > 0) & (power > 0)
    slowness = np.where(known, moment / np.where(known, power, 1.0), 1.0)
    weights = np.where(known, rows[:, 9], 0.0)
    if not known.any():
        return rows
    # The mean slowness is 1, so that the unit of the cost is seconds.
    slowness = slowness * (math.fsum(weights.tolist()) / math.fsum((weights * slowness).tolist()))
    scaled = rows.copy()
    scaled[:, :6] *= (slowness * slowness)[:, None]
    scaled[:, 6:9] *= slowness[:, None]
    return scaled


def _solve(sums: Sequence[float], prior: _Vector) -> _Vector:
    """Return the non-negative least-squares solution, with the prior as a weak regularization."""
    products, moments, count = np.zeros((3, 3)).tolist(), list(sums[6:9]), sums[9]
    for value, (i, j) in zip(sums[:6], _PAIRS, strict=True):
        products[i][j] = products[j][i] = value
    form = _quadratic_form(sums[:6], prior)
    scale = _times(moments, prior) / form if form > 0 else 1.0  # the prior in seconds
    for i in range(3):
        ridge = PRIOR_WEIGHT * products[i][i] / count
        products[i][i] += ridge
        moments[i] += ridge * scale * prior[i]
    best, least = prior, math.inf
    # Try all seven sets of nonzero unknowns: the best of the non-negative solutions is the exact one.
    for free in (chosen for size in (1, 2, 3) for chosen in combinations(range(3), size)):
        solution = _eliminate([[products[i][j] for j in free] + [moments[i]] for i in free])
        if solution is None or min(solution) < 0:
            continue
        # At a stationary point, the objective is minus the moments times the solution.
        value = -sum(moments[i] * x for i, x in zip(free, solution, strict=True))
        if value < least:
            nonzero = dict(zip(free, solution, strict=True))
            best, least = (nonzero.get(0, 0.0), nonzero.get(1, 0.0), nonzero.get(2, 0.0)), value
    return best


def _eliminate(system: list[list[float]]) -> list[float] | None:
    """Solve a small symmetric system whose last column is the right-hand side. Returns None if it is singular."""
    size = len(system)
    for i in range(size):
        pivot = system[i][i]
        if not pivot > 0:
            return None
        system[i] = [value / pivot for value in system[i]]
        for j in range(size):
            if j != i:
                factor = system[j][i]
                system[j] = [a - factor * b for a, b in zip(system[j], system[i], strict=True)]
    return [row[-1] for row in system]


def _times(values: Any, coefficients: _Vector) -> Any:
    return values[0] * coefficients[0] + values[1] * coefficients[1] + values[2] * coefficients[2]


def _quadratic_form(products: Any, coefficients: _Vector) -> Any:
    total = 0.0 * products[0]
    for value, (i, j) in zip(products, _PAIRS, strict=True):
        total = total + (1.0 if i == j else 2.0) * coefficients[i] * coefficients[j] * value
    return total
