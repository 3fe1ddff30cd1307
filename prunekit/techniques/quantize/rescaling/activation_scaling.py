"""Scales the channels of a model by the activations that they carry, before its weights are rounded (AWQ).

Source: Lin et al. 2023, arXiv:2306.00978, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.statistics.input_statistics import InputMoments
from prunekit.core.statistics.layer_products import LayerProduct, product_of
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import RangeRule
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.rescaling.awq import (
    LIMIT,
    PER_OUTPUT,
    Reading,
    awq_factors,
    input_channels,
    table_product,
)
from prunekit.techniques.quantize.rescaling.channel_scaling import (
    ChannelScaling,
    all_rescaled,
    folded_kernel,
    storable,
    wide_value,
)
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

# Most entries of the Hessians that are summed in one pass over the data: 1 GiB.
_AT_ONCE = 1 << 27
# Largest factor of a channel in float16, whose numbers end at 65504.
_LIMIT_OF_HALF = 2.0**4


@dataclass(frozen=True, eq=False)
class ActivationScaling:
    """New weights, and what they change.

    Attributes:
        values: Pairs (variable, new values) of the weights that change, for `variable_values.assigned`.
        layers: Names of the layers whose output channels are multiplied by factors.
        examined: Number of layers for whose output channels factors were searched.
    """

    values: list[tuple[Any, np.ndarray]]
    layers: tuple[str, ...]
    examined: int


def activation_scaled(
    placement: Placement,
    targets: Mapping[int, Target],
    batches: Callable[[], Iterable[Any]],
    bits: Mapping[int, int],
    rule: Callable[[int], RangeRule],
    *,
    wanted: Callable[[ChannelScaling], bool] | None = None,
) -> ActivationScaling:
    """Returns weights that compute the same, and that are rounded with a smaller error of the layers' outputs.

    Kernels are divided by factors of the channels that they read, and the layers that compute these channels multiply
    them by the factors; see `rescalable` for which layers this is exact, and `awq_factors` for the factors. The model
    stays unchanged until the values are assigned.

    Args:
        placement: The model's calls in units.
        targets: id of a variable -> the kernel, for those that are rounded.
        batches: Returns the inputs of the calibration data, in batches; called for each pass.
        bits: id of a variable -> bits of its codes. Of the kernels that read the same channels, and the table that
            computes them, the fewest count.
        rule: Returns what chooses the ranges of kernels with so many bits.
        wanted: Returns True for a tensor whose channels may be multiplied by factors; None = all of `rescalable`.

    Memory, besides a forward pass of one batch: 1 GiB, or 8 * K ** 2 bytes for the largest layer of K inputs.
    """
    sizes = {id(weight.variable): weight.granularity.group_size for weight in placement.weights()}
    each = (_channels(one, targets, sizes) for one in rescalable(placement, wanted))
    found = [one for one in each if one is not None]
    model, factors = placement.graphs.main.model, []
    for group in _groups(found):
        read = [product.target for one in group for product in one.products.values()]
        moments = InputMoments(model, read)
        moments.reset()
        for inputs in batches():
            moments.observe(inputs, None)
        values = dict(zip([id(target.variable) for target in read], moments.values(), strict=True))
        for one in group:
            fewest = min(bits[key] for key in one.products)
            factors.append(one.factors(values, IntegerFormat(fewest), rule(fewest)))
    scalings = [one.scaling for one in found]
    names = placement.graphs.names
    changed = tuple(
        names.get(id(one.producer.first.operation), one.producer.first.name)
        for one, each in zip(scalings, factors, strict=True)
        if (each != 1.0).any()
    )
    return ActivationScaling(storable(all_rescaled(scalings, factors)), changed, len(scalings))


@dataclass(frozen=True, eq=False)
class _Channels:
    """Channels whose factors are searched.

    Attributes:
        scaling: The tensor.
        products: id of a kernel that reads the channels, or of the table that computes them, if it is rounded -> its
            product.
        group_sizes: id of a weight -> number of consecutive inputs that share a scale; None = all of an output.
    """

    scaling: ChannelScaling
    products: Mapping[int, LayerProduct]
    group_sizes: Mapping[int, int | None]

    @property
    def entries(self) -> int:
        """Number of entries of the Hessians of the readers."""
        return sum(one.groups * one.inputs**2 for one in self.products.values() if not one.diagonal)

    def factors(self, moments: Mapping[int, Mapping[str, Any]], form: IntegerFormat, rule: RangeRule) -> Any:
        """Returns the factors of the channels; moments: id of a kernel or table -> the moments of its inputs."""
        readings, rows = [], []
        sums, counts = np.zeros(self.scaling.channels), np.zeros(self.scaling.channels)
        for unit, kernel in zip(self.scaling.readers, self.scaling.kernels, strict=True):
            product = self.products.get(id(kernel.variable))
            if product is None:
                continue
            channels, found = input_channels(product, kernel), moments[id(kernel.variable)]
            matrices = product.matrix(folded_kernel(unit, kernel, wide_value))
            readings.append(Reading(matrices, found["gram"], channels, self._shared(id(kernel.variable))))
            rows.append(found["rows"])
            np.add.at(sums, channels, found["mean_abs"])
            np.add.at(counts, channels, 1)
        mean_abs = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        tables = [
            replace(
                table_product(wide_value(product.target.variable), moments[key]["gram"], readings, rows),
                granularity=self._shared(key),
            )
            for key, product in self.products.items()
            if product.diagonal
        ]
        limit = _LIMIT_OF_HALF if self.scaling.is_half else LIMIT
        return awq_factors(readings, mean_abs, form, tables=tables, rule=rule, limit=limit)

    def _shared(self, weight: int) -> Granularity:
        """Returns which entries of the matrices of a weight share a scale."""
        return replace(PER_OUTPUT, group_size=self.group_sizes[weight])


def _channels(
    scaling: ChannelScaling, targets: Mapping[int, Target], group_sizes: Mapping[int, int | None]
) -> _Channels | None:
    """Returns channels with the products of the weights that are rounded; None if factors cannot be searched.

    This is so if no kernel that reads the channels is rounded, or one has no known product.
    """
    read = [id(kernel.variable) for kernel in scaling.kernels if id(kernel.variable) in targets]
    written = [id(one.variable) for one in scaling.written if id(one.variable) in targets]
    tables = [key for key in written if targets[key].role == "embedding"]
    try:
        products = {key: product_of(targets[key]) for key in (*read, *tables)}
    except ValueError:
        return None
    return _Channels(scaling, products, group_sizes) if read else None


def _groups(found: Sequence[_Channels]) -> Iterator[list[_Channels]]:
    """Yields consecutive channels whose Hessians fit into memory together."""
    group: list[_Channels] = []
    for one in found:
        if group and sum(other.entries for other in group) + one.entries > _AT_ONCE:
            yield group
            group = []
        group.append(one)
    if group:
        yield group
