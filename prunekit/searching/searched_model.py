"""What a search may change of a model: weights and their levels, groups of channels and how many are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.channel_order import Order
from prunekit.anatomy.channels.channels import find_channels
from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.layers.linear_kinds import SEPARABLE
from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.outputs.graph_steps import GraphStep, steps_of
from prunekit.core.runtime.backend import bytes_of
from prunekit.core.runtime.kept_grids import check_off_grids
from prunekit.core.statistics.channel_importance import GroupImportance, entry_scores
from prunekit.core.statistics.layer_products import LayerProduct, product_of, unfitted
from prunekit.searching.judge import batched
from prunekit.sparsity.scores import get_criterion
from prunekit.techniques.factorize.factorizing import PRUNED, zeros_of
from prunekit.techniques.factorize.forms import SEPARABLE as FORM_SEPARABLE, Layout, Structure
from prunekit.techniques.factorize.layer_parts import layout_of, refusal
from prunekit.techniques.quantize.grids.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.text_inputs import reads_texts
from prunekit.techniques.quantize.preparation import Preparation
from prunekit.techniques.quantize.rounding.weight_rounding import grid_of_weight

# How a model is quantized where nothing else is asked for.
EIGHT_BITS = QuantizationOptions(activation_bits=8)
# Importance of channels within a group.
CRITERION = "l2"


@dataclass(frozen=True)
class LayerShapes:
    """What a layer reads and writes, for one example.

    Attributes:
        inputs: Shape of its input.
        outputs: Shape of its output.
        reads_floats: False for a lookup of whole numbers.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reads_floats: bool

    def entries(self, target: Target) -> dict[str, float]:
        """Returns the entries of what is read and what is computed with a weight: "inputs" and "outputs"."""
        found = {"inputs": float(math.prod(self.inputs)), "outputs": float(math.prod(self.outputs))}
        if isinstance(target.layer, SEPARABLE):
            kernel = target.layer.depthwise_kernel.shape
            middle = math.prod(self.outputs[:-1]) * kernel[-2] * kernel[-1]
            found["outputs" if target.role == "depthwise_kernel" else "inputs"] = float(middle)
        return found

    def between(self, target: Target, structure: Structure | None) -> int:
        """Returns the entries between two layers of low rank in the place of one; 0 for the layer itself."""
        if structure is None:
            return 0
        # The first layer of "separable" has the vertical strides alone.
        longer = target.layer.strides[1] if structure.form == FORM_SEPARABLE else 1
        return int(self.positions(target)) * longer * structure.ranks[0]

    def positions(self, target: Target) -> float:
        """Returns how many vectors the layer multiplies by a weight in one example."""
        return max(1.0, math.prod(self.outputs) / math.prod(target.shape[axis] for axis in target.out_axes))


def _walked(model: Any, inputs: Any) -> tuple[Sequence[GraphStep], dict[int, LayerShapes], list[int]]:
    """Returns the calls of a model, the shapes of layers with one input and one output, and the bytes of all calls."""
    first = keras.tree.map_structure(lambda leaf: leaf[:1], inputs)
    steps = steps_of(model, first)
    values = dict(zip(steps.inputs, steps.flat_inputs(first), strict=True))
    found, sizes = {}, []
    for step in steps.steps:
        step.compute(values)
        sizes.append(bytes_of(values[key] for key in step.writes))
        if step.layer is not None and len(step.reads) == len(step.writes) == 1:
            read, computed = values[step.reads[0]], values[step.writes[0]]
            floats = "float" in keras.backend.standardize_dtype(read.dtype)
            found[id(step.layer)] = LayerShapes(tuple(read.shape[1:]), tuple(computed.shape[1:]), floats)
    return steps.steps, found, sizes


def _called(steps: Sequence[GraphStep]) -> dict[int, int]:
    """Returns which call computes each layer that one call alone computes; see `SearchedModel.called`.

    Not those inside recurrent layers, whose loops show no calls, and inside wrappers, which call them on other shapes.
    """
    found: dict[int, list[int]] = {}
    for step in steps:
        if not isinstance(step.layer, keras.layers.Layer):
            continue
        inside = step.layer._flatten_layers()
        closed = any(isinstance(one, keras.layers.RNN | keras.layers.Wrapper) for one in inside)
        for one in [step.layer] if closed else inside:
            found.setdefault(id(one), []).append(id(step.layer))
    return {key: calls[0] for key, calls in found.items() if len(calls) == 1}


class SearchedModel:
    """A model that is searched.

    Args:
        model: A built Keras model with a graph of layers; it is not changed.
        inputs: Calibration inputs.
        options: How it is quantized.

    Attributes:
        model: The model.
        preparation: Placement and selection of its quantization.
        products: The product of each weight whose level is chosen, by its name.
        layouts: The axes of those among them that can have a low rank.
        channels: Its channels.
        orders: The order of removal of each group, by its name.
        called: id of a layer that is called once, itself or inside another one -> id of the layer of that call.
        shapes: id of a layer with one input and one output -> their shapes.
        activation_bytes: Bytes of the outputs of each call for one example.
        skipped: Weights that no level is chosen for, with reasons.

    Raises:
        TypeError, ValueError: As for `pk.quantize`; the model has no graph of layers.
    """

    def __init__(self, model: Any, inputs: Any, options: QuantizationOptions = EIGHT_BITS):
        if graph_of(model) is None:
            raise ValueError(
                "A search follows the calls of a Sequential or functional model. Received: "
                f"{type(model).__name__} with a call of its own. Compress it with a recipe."
            )
        if reads_texts(model):
            raise ValueError(
                f"A LiteRT file reads numbers. Received: the model {model.name!r}, which reads texts. Search the part "
                "behind the layer that makes numbers of them, on its outputs."
            )
        check_off_grids(model, "A search", "Search the model as it was before.")
        self.model = model
        self.preparation = Preparation(model, options, batched(inputs))
        self._weights = {id(one.variable): one for one in self.preparation.weights}
        targets = [self.preparation.selection.targets[key] for key in self._weights]
        steps, self.shapes, self.activation_bytes = _walked(model, inputs)
        self.called = _called(steps)
        lacking = unfitted(targets) | {
            target.name: "its layer is called several times, or inside a recurrent layer or a wrapper"
            for target in targets
            if id(target.layer) not in self.called
        }
        self.products: dict[str, LayerProduct] = {
            target.name: product_of(target) for target in targets if target.name not in lacking
        }
        # The arrays in the place of a pruned weight would have none of its zeros.
        alone = [one for one in targets if one.name in self.products and self.called[id(one.layer)] == id(one.layer)]
        possible = [one for one in alone if one.role != "embedding" and zeros_of(one) < PRUNED]
        self.layouts: dict[str, Layout] = {one.name: layout_of(one) for one in possible if refusal(one) is None}
        known = self.preparation.selection.skipped
        self.skipped = (*known, *(Skipped(name, f"8 bits, since {reason}") for name, reason in lacking.items()))
        self.channels = find_channels(model)
        self.orders = self._orders(inputs)
        if not self.products and not self.orders:
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in self.skipped[:3]) or "no kernels"
            raise ValueError(f"The model {model.name!r} has no weight or channel to choose for. Received: {reasons}.")

    def _orders(self, inputs: Any) -> dict[str, Order]:
        criterion = get_criterion(CRITERION)
        scores = entry_scores(self.channels, criterion, inputs if criterion.needs else None)
        importances = GroupImportance().of(self.channels, scores)
        rows = zip(self.channels.groups, importances, strict=True)
        return {group.name: Order([group], [values]) for group, values in rows}

    @property
    def targets(self) -> list[Target]:
        """The weights whose levels are chosen."""
        return [product.target for product in self.products.values()]

    @property
    def inputs_per_position(self) -> float:
        """The most inputs of a layer's product, for each vector of inputs that it has in one example."""
        found = [1.0]
        for target in self.targets:
            shapes = self.shapes.get(id(target.layer))
            positions = 1.0 if shapes is None else shapes.positions(target)
            if target.role != "embedding":
                found.append(target.size / math.prod(target.shape[axis] for axis in target.out_axes) / positions)
        return max(found)

    def grid_of(self, target: Target, kernel: np.ndarray, bits: int) -> Grid:
        """Returns the grid of a weight for a kernel and so many bits."""
        granularity = self._weights[id(target.variable)].granularity
        rule = self.preparation.options.weight_rule(bits)
        return grid_of_weight(target.name, kernel.astype("float32"), IntegerFormat(bits), granularity, rule)

    def grid_of_factor(self, target: Target, matrix: np.ndarray, bits: int) -> Grid:
        """Returns the grid of an array of low rank that stands in the place of a weight, with so many bits."""
        granularity = Granularity((1,) if self._weights[id(target.variable)].granularity.axes else ())
        rule = self.preparation.options.weight_rule(bits)
        return grid_of_weight(target.name, matrix.astype("float32"), IntegerFormat(bits), granularity, rule)

    def rounded_weight(self, target: Target) -> Any:
        """Returns how the quantization sees a weight."""
        return self._weights[id(target.variable)]

    def removed(self, kept: Mapping[str, int]) -> np.ndarray:
        """Returns the channels that are removed when groups keep so many of their units."""
        found = [
            order.removed(np.array([order.total - kept[name]])) for name, order in self.orders.items() if name in kept
        ]
        return np.concatenate(found) if found else np.zeros(0, int)

    def entries_of(self, name: str) -> int:
        """Returns the entries of a weight, or of all weights that have the channels of a group."""
        if name in self.products:
            return self.products[name].target.size
        group = next(group for group in self.channels.groups if group.name == name)
        names = {member.weight for member in group.members}
        return sum(math.prod(one.variable.shape) for one in self.channels.links.weights.values() if one.name in names)

    def kept_counts(self, name: str, shares: Sequence[float]) -> list[int]:
        """Returns the numbers of kept units of a group for shares, descending, all of them first."""
        order = self.orders[name]
        least = order.total - order.length
        found = {max(round(order.total * share), least, 1) for share in shares}
        return sorted(found | {order.total}, reverse=True)
