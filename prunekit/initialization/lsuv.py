"""LSUV: kernels scaled, layer by layer, until data leave each layer with unit variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.targets import Target
from prunekit.core import compilation
from prunekit.core.layer_observer import as_tensors, observe, spread

_SCALED_ROLES = ("kernel", "depthwise_kernel", "embedding")


@dataclass(frozen=True, eq=False)
class LSUV:
    """Layer-sequential unit variance: an orthogonal start, then each layer scaled until data leave it with `target`.

    Only for `reinitialize`: a layer's initializer sees neither the model nor data. In the order of the calls, the
    kernel of each layer is divided by the standard deviation of the layer's output, before its activation function,
    until the output's variance is `target`. Inside recurrent and time-distributed layers it stays orthogonal.

    Args:
        x: One batch of inputs, an array or the structure of arrays that the model takes.
        target: Variance to reach, over examples, positions and units together.
        tolerance: Accepted difference, as a fraction of `target`.
        max_iterations: Scalings of one layer, at most. One is enough where there is no bias.
        gain: Of the orthogonal start.
        seed: An integer; None draws one.

    Raises:
        ValueError: A number is out of its range.

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
    """How one kernel ended: the variance of its layer's output, and what is worth knowing beside it, or ""."""

    output_variance: float | None
    note: str


class Outputs:
    """The layers' outputs on one batch, before their activation functions, measured by one compiled pass.

    Args:
        model: A built model.
        targets: The weights that may be scaled: of each layer the last one, on which its output depends linearly.
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
        # A shared layer has one kernel for all its calls: their mean is what can be scaled.
        return ops.stack([ops.mean(ops.stack(calls)) for calls in found.values()]) if found else ops.zeros((0,))

    def _deviations(self) -> np.ndarray:
        return np.asarray(ops.convert_to_numpy(self._measure()), np.float64)

    def scale(self, options: LSUV) -> dict[str, Scaled]:
        """Scales the kernels in place, in the order of the calls; target name -> how it ended, for every target."""
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
