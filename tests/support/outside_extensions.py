"""Extensions as a package outside prunekit would write them: one class, one row each."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.graph.watching import watching
from prunekit.core.statistics.statistics import DataCollector
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.scores import Criterion
from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.shorthands import (
    ALLOCATIONS,
    CRITERIA,
    POLICIES,
    STATISTICS,
    AllocationRow,
    CriterionRow,
    PolicyRow,
    StatisticRow,
)
from prunekit.techniques.pruning.policies.gradual import Gradual


class InputSquares(DataCollector):
    """The sum over all examples of the squared inputs of each Dense target, shape (inputs,)."""

    def reset(self):
        self.sums = [np.zeros(target.shape[0]) for target in self.targets]
        self.batches = 0

    def observe(self, inputs, labels):
        places = {id(target.layer): i for i, target in enumerate(self.targets)}
        self.batches += 1

        def seen(original, layer, args, kwargs):
            if id(layer) in places:
                self.sums[places[id(layer)]] += np.sum(ops.convert_to_numpy(args[0]) ** 2, axis=0)
            return original(layer, *args, **kwargs)

        with watching(seen), keras.StatelessScope():
            self.model(inputs, training=False)

    def values(self):
        return [ops.convert_to_tensor(total.astype("float32")) for total in self.sums]


@dataclass(frozen=True)
class InputWeighted(Criterion):
    """|w| times the norm of its input."""

    needs: ClassVar[frozenset[str]] = frozenset({"input_squares"})

    def __call__(self, weight, *, target=None, seed_offset=0, statistics=None):
        norms = ops.sqrt(statistics["input_squares"])
        return ops.abs(ops.convert_to_tensor(weight)) * ops.reshape(norms, (-1, *[1] * (len(target.shape) - 1)))


@dataclass(frozen=True)
class Evolving(Gradual):
    """Reaches the schedule's counts; then, at each update, exchanges a fraction of the kept entries for pruned ones.

    New entries are drawn at random and begin with the value `value`.
    """

    regrows: ClassVar[bool] = True

    fraction: float = 0.25
    value: float = 0.0
    seed: int | None = None

    def update(self, request):
        found = super().update(replace(request, masks=[np.ones(t.shape, bool) for t in request.targets]))
        if all(request.kept == [t.size for t in request.targets]):
            return found
        rng = np.random.default_rng((self.seed or 0, request.step))
        masks, weights = [], []
        for target, mask, count in zip(request.targets, request.masks, found.kept, strict=True):
            weight = ops.convert_to_numpy(ops.convert_to_tensor(target.variable)).ravel().copy()
            old = ops.convert_to_numpy(mask).ravel()
            new = int(min(self.fraction * count, (~old).sum()))
            kept = np.argsort(np.where(old, -np.abs(weight), np.inf), kind="stable")[: count - new]
            grown = rng.choice(np.flatnonzero(~old), new, replace=False)
            mask = np.zeros(target.size, bool)
            mask[kept] = mask[grown] = True
            weight[grown] = self.value
            masks.append(mask.reshape(target.shape))
            weights.append(weight.reshape(target.shape))
        return replace(found, masks=masks, weights=weights, changed=True, leaks=0 * found.leaks)


@dataclass(frozen=True)
class ByMeanScore(Allocation):
    """Prunes nothing of the weight with the largest mean score, and the others evenly."""

    needs_scores: ClassVar[bool] = True

    def sparsities(self, sparsity, targets, scores=None):
        sizes = [math.prod(target.shape) for target in targets]
        best = int(np.argmax([float(ops.mean(score)) for score in scores]))
        rest = sum(sizes) - sizes[best]
        return [0.0 if i == best else pruned_count(sparsity, sum(sizes)) / rest for i in range(len(sizes))]


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Context manager in which the extensions have their rows."""
    rows = [
        (STATISTICS, StatisticRow("input_squares", InputSquares, source="data")),
        (CRITERIA, CriterionRow("input_weighted", InputWeighted, needs=("input_squares",))),
        (ALLOCATIONS, AllocationRow("by_mean_score", ByMeanScore)),
        (
            POLICIES,
            PolicyRow(
                "evolving",
                Evolving,
                options={"fraction": (float, 0.25), "value": (float, 0.0), "seed": (int | None, None)},
            ),
        ),
    ]
    for registry, row in rows:
        registry.add(row)
    try:
        yield
    finally:
        for registry, row in rows:
            registry.remove(row.name)
