"""LSUV: scales kernels, layer by layer, until each layer's output on given data has unit variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import compilation
from prunekit.core.statistics.layer_observer import as_tensors, observe, spread

_SCALED_ROLES = ("kernel", "depthwise_kernel", "embedding")


@dataclass(frozen=True, eq=False)
class LSUV:
    """Layer-sequential unit variance: orthogonal kernels, scaled so that each layer's output has variance `target`.

    Works only in `reinitialize`, because a layer's `kernel_initializer` has no access to the model or to data. In call
    order, each layer's kernel is divided by the standard deviation of the layer's output before its activation
    function, until the output's variance is `target`. Kernels inside recurrent and time-distributed layers are not
    scaled: they stay orthogonal.

    Args:
        x: One batch of inputs, an array or the structure of arrays that the model takes.
        target: Target variance, over examples, positions and units together.
        tolerance: Accepted difference from `target`, as a fraction of `target`.
        max_iterations: Maximum number of scalings per layer. One scaling is enough for a layer without bias.
        gain: Gain of the orthogonal initialization.
        seed: An integer; None draws a random seed.

    Raises:
        ValueError: An argument is out of range.

    Source: Mishkin and Matas 2015, arXiv:1511.06422, algorithm 1.
    """

    x: Any
    target: float = 1.0
    tolerance: float = 0.05
    max_iterations: int = 10
    gain: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("target", "tolerance", "gain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"LSUV needs a finite {name} above 0. Received: {name}={getattr(self, name)}.")
        if self.max_iterations < 1:
            raise ValueError(f"LSUV scales at least once. Received: max_iterations={self.max_iterations}.")


@dataclass(frozen=True)
class Scaled:
    """The result for one kernel: the variance of its layer's output, and a remark or ""."""

    output_variance: float | None
    note: str


class Outputs:
    """Measures the layers' outputs on one batch, before their activation functions, in one compiled pass.

    Args:
        model: A built model.
        targets: The candidate weights. Only the last weight of each layer is scaled: the output is linear in it.
        x: The batch.
    """

    def __init__(self, model: Any, targets: Sequence[Target], x: Any):
        self._model = model
        self._inputs = as_tensors(x)
        self._targets = tuple(targets)
        self._scaled = {id(target.layer): target for target in targets if target.role in _SCALED_ROLES}
        self._called: list[int] = []
        self._measure = compilation.compiled_effect(self._pass)
        self._deviations()

    def _pass(self) -> Any:
        found: dict[int, list[Any]] = {}

        def see(layer: Any, before: Any, after: Any) -> None:
            if id(layer) in self._scaled:
                found.setdefault(id(layer), []).append(ops.cast(spread(before), "float32"))

        observe(self._model, self._inputs, see)
        self._called = list(found)
        # A shared layer has one kernel for all its calls: only the mean over the calls can be scaled.
        return ops.stack([ops.mean(ops.stack(calls)) for calls in found.values()]) if found else ops.zeros((0,))

    def _deviations(self) -> np.ndarray:
        return np.asarray(ops.convert_to_numpy(self._measure()), np.float64)

    def scale(self, options: LSUV) -> dict[str, Scaled]:
        """Scales the kernels in place, in call order; returns {target name: `Scaled`} for every target."""
        deviations = self._deviations()
        for index, key in enumerate(self._called):
            variable = self._scaled[key].variable
            for _ in range(options.max_iterations):
                if _reached(deviations[index], options) or not 0 < deviations[index] < math.inf:
                    break
                variable.assign(variable * (math.sqrt(options.target) / deviations[index]))
                deviations = self._deviations()
        ends = {self._scaled[key].name: _end(deviations[index], options) for index, key in enumerate(self._called)}
        return {target.name: ends.get(target.name, self._unscaled(target)) for target in self._targets}

    def _unscaled(self, target: Target) -> Scaled:
        other = self._scaled.get(id(target.layer))
        if target.role not in _SCALED_ROLES or other is target:
            return Scaled(None, "not scaled: the layer runs in a loop, or the model did not call it")
        return Scaled(None, f"not scaled: {other.name if other else 'another weight'} is")


def _reached(deviation: float, options: LSUV) -> bool:
    return abs(deviation**2 - options.target) <= options.tolerance * options.target


def _end(deviation: float, options: LSUV) -> Scaled:
    if not 0 < deviation < math.inf:
        return Scaled(float(deviation**2), "not scaled: its output does not vary, or is not finite")
    note = "" if _reached(deviation, options) else f"not within the tolerance after {options.max_iterations} scalings"
    return Scaled(float(deviation**2), note)
