"""Cross-layer equalization: gives the weights that compute a channel and those that read it the same range.

One scale for a whole kernel is coarse if the ranges of its channels differ. Factors between two layers, which leave the
model's outputs unchanged, move a range from one layer to the other.

Source: Nagel et al. 2019, arXiv:1906.04721, section 4.1, eq. 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.sparsity.arguments import whole
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.rescaling.channel_scaling import (
    ChannelScaling,
    Values,
    all_rescaled,
    folded_kernel,
    output_kernel,
    rescaled,
    storable,
    wide_value,
)
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

_SWEEPS = 100
# Factors nearer to 1 than this are not applied, so that a second equalization changes nothing.
_TOLERANCE = 1e-3
# Largest factor of a channel, and largest number, in float32 and in float16. A channel with nearly no weights would get
# a factor that makes its bias the largest of the layer.
_LIMITS = {"float32": (2.0**10, float(np.finfo("float32").max)), "float16": (2.0**4, float(np.finfo("float16").max))}


@dataclass(frozen=True)
class EqualizedLayers:
    """A layer and its readers whose ranges were equalized.

    Attributes:
        producer: Name of the layer that computes the channels.
        readers: Names of the layers that read the channels.
        channels: Number of channels.
        changed: Number of channels with a factor other than 1.
        largest_factor: The factor farthest from 1, or its reciprocal if that is larger.
    """

    producer: str
    readers: tuple[str, ...]
    channels: int
    changed: int
    largest_factor: float


@dataclass(frozen=True, eq=False)
class Equalization:
    """New weights, and what they change.

    Attributes:
        values: Pairs (variable, new values) of the weights that change, for `variable_values.assigned`.
        layers: The layers whose channels are multiplied by factors.
        pairs: Number of layers and their readers that were examined, also those that need no change.
        sweeps: Number of sweeps over them.
        converged: False if the last allowed sweep still changed a factor.
    """

    values: list[tuple[Any, np.ndarray]]
    layers: tuple[EqualizedLayers, ...]
    pairs: int
    sweeps: int
    converged: bool


def equalized(
    placement: Placement, *, wanted: Callable[[ChannelScaling], bool] | None = None, sweeps: int = _SWEEPS
) -> Equalization:
    """Returns the weights with equal ranges in a layer's output channels and in the kernels that read these channels.

    Ranges are those of tables and of kernels with folded batch normalization. If several layers read a channel, the
    largest of their ranges counts. A channel with a range of zero on one side is left as it is. Normalizations have no
    kernel, so their factors are left as they are. The model stays unchanged until the values are assigned.

    Args:
        placement: The model's calls in units.
        wanted: Returns True for a tensor whose channels may be multiplied by factors; None = all of `rescalable`.
        sweeps: Largest number of sweeps over all layers. The factors of one layer change the ranges of its neighbours.

    Raises:
        ValueError: `sweeps` is below 1.
        TypeError: `sweeps` is no integer.
    """
    sweeps = whole("sweeps", sweeps, 1)
    scalings = [one for one in rescalable(placement, wanted) if output_kernel(one.producer.first) is not None]
    magnitudes = _Magnitudes(scalings)
    total = [np.ones(scaling.channels) for scaling in scalings]
    changed, done = bool(scalings), 0
    while changed and done < sweeps:
        changed, done = False, done + 1
        for index, scaling in enumerate(scalings):
            factors = _factors(scaling, magnitudes, total[index])
            if (factors != 1.0).any():
                changed = True
                total[index] = total[index] * factors
                magnitudes.set(rescaled(scaling, factors, magnitudes.value))
    names = placement.graphs.names
    rows = [_row(scaling, factors, names) for scaling, factors in zip(scalings, total, strict=True)]
    return Equalization(
        storable(all_rescaled(scalings, total)),
        tuple(row for row in rows if row.changed),
        len(scalings),
        done,
        not changed,
    )


def _row(scaling: ChannelScaling, factors: np.ndarray, names: Mapping[int, str]) -> EqualizedLayers:
    """Returns the row of a report; `names`: id of a layer -> its name, where that is not its own."""
    producer, *readers = (
        names.get(id(unit.first.operation), unit.first.name) for unit in (scaling.producer, *scaling.readers)
    )
    changed, largest = int(np.count_nonzero(factors != 1.0)), float(np.maximum(factors, 1 / factors).max(initial=1.0))
    return EqualizedLayers(producer, tuple(dict.fromkeys(readers)), scaling.channels, changed, largest)


class _Magnitudes:
    """Magnitudes of weights while the factors are calculated: of entries that have the same factors, the largest."""

    def __init__(self, scalings: Sequence[ChannelScaling]):
        self._values: dict[int, np.ndarray] = {}
        self._axes: dict[int, set[int]] = {}
        for scaling in scalings:
            outputs = [output_kernel(unit.first) for unit in (scaling.producer, *scaling.readers)]
            for weight in (*scaling.written, *scaling.kernels, *outputs):
                if weight is not None:
                    rank, shape = len(weight.variable.shape), weight.channels.shape
                    axes = {rank - len(shape) + axis for axis, length in enumerate(shape) if length > 1}
                    self._axes.setdefault(id(weight.variable), set()).update(axes)

    def value(self, variable: Any) -> np.ndarray:
        """Returns the magnitudes of a weight, float64; length 1 along axes whose entries have the same factors."""
        if id(variable) not in self._values:
            values = np.abs(wide_value(variable))
            axes = self._axes.get(id(variable), range(values.ndim))
            alike = tuple(axis for axis in range(values.ndim) if axis not in axes)
            self._values[id(variable)] = values.max(axis=alike, keepdims=True, initial=0.0)
        return self._values[id(variable)]

    def set(self, pairs: Sequence[tuple[Any, np.ndarray]]) -> None:
        """Replaces magnitudes."""
        self._values |= {id(variable): values for variable, values in pairs}


def channel_ranges(scaling: ChannelScaling, value: Values = wide_value) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest magnitude of each channel in the kernel that computes it, and in the kernels that read it.

    Args:
        scaling: A tensor that a linear layer computes.
        value: Returns the values of a variable.

    Returns:
        Two arrays of shape (channels,), of kernels with folded batch normalization.
    """
    count, kernel = scaling.channels, output_kernel(scaling.producer.first)
    if kernel is None:
        raise ValueError(f"{scaling.producer.name} has no kernel with an axis of output channels.")
    computed = kernel.largest(folded_kernel(scaling.producer, kernel, value), count)
    readers = zip(scaling.readers, scaling.kernels, strict=True)
    return computed, np.max([one.largest(folded_kernel(unit, one, value), count) for unit, one in readers], axis=0)


def _factors(scaling: ChannelScaling, magnitudes: _Magnitudes, total: np.ndarray) -> np.ndarray:
    """Returns the next factors of a layer's output channels; 1 for channels that are left as they are.

    Args:
        scaling: The channels.
        magnitudes: Present magnitudes of the weights.
        total: Product of the factors so far.
    """
    computed, read = channel_ranges(scaling, magnitudes.value)
    used = (computed > 0) & (read > 0)
    factors = np.ones(scaling.channels)
    factors[used] = np.sqrt(read[used] / computed[used])
    limit, largest = _LIMITS["float16" if scaling.is_half else "float32"]
    # The weights themselves must not overflow either, among them biases.
    peaks = [
        np.max([one.largest(magnitudes.value(one.variable), scaling.channels) for one in side], axis=0)
        for side in (scaling.written, scaling.kernels)
    ]
    with np.errstate(divide="ignore"):
        factors = np.clip(factors, np.minimum(peaks[1] / largest, 1.0), np.maximum(largest / peaks[0], 1.0))
    factors = np.clip(total * factors, 1 / limit, limit) / total
    return np.where(np.abs(np.log(factors)) <= _TOLERANCE, 1.0, factors)
