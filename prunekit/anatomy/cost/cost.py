"""The cost of one forward and one backward pass of a model: multiply-accumulates and bytes of activations.

The counts cover the multiply-accumulates of kernels and of the products inside attention and Dot layers. They exclude
biases, normalisation, activations, pooling, image augmentation, and `keras.ops` called outside a layer. Padding counts
as data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np

from prunekit.anatomy.graph.tracing import NOT_CALLED, Trace, checked_trace
from prunekit.anatomy.layers.layers import sublayers
from prunekit.anatomy.layers.model_weights import Weight, check_built, places, weights_in
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.tables import at_least, known_sum, plain, table
from prunekit.sparsity.arguments import whole
from prunekit.sparsity.array_ops import SMALL, array_of


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, over all calls of it in one pass.

    The backward pass is that of a training step with `training=True` whose loss depends on every output of the model.
    It consists only of the operations that the gradients of the trained weights need: the gradient of each trained
    weight, and the gradient of each activation computed from trained weights. Each gradient takes as many
    multiply-accumulates as its forward product. All time steps of a recurrent layer have the same cost.

    Attributes:
        layer: Readable path, such as "block/conv_1".
        type: Name of the layer's class.
        parameters: Number of weights owned by the layer (for RNN layers including the cell's); shared weights count
            once.
        macs: Multiply-accumulates of one forward pass; None if unknown.
        sparse_macs: `macs` without the multiply-accumulates of zero weights; products between activations count fully.
        backward_macs: Multiply-accumulates of one backward pass; None if unknown.
        sparse_backward_macs: `backward_macs` without the multiply-accumulates of zero weights, both in the gradients of
            activations (which multiply with the weights) and in the gradients of the zero weights (assumed masked).
        activation_bytes: Bytes of the layer's output tensors in one forward pass (without intermediate tensors), each
            in its own dtype, over all steps of a recurrent layer; None if unknown. A tensor that an earlier layer
            returned, such as the output of the last layer inside a block, counts only for the earlier layer.
        backward_activation_bytes: Bytes of the gradients of the layer's output tensors in training; None if unknown.
            Zero weights do not reduce either byte count: activations and their gradients are stored dense.
        output_shape: Shape of the first output of the first call, batch included; None if the layer was not called.
    """

    layer: str
    type: str
    parameters: int
    macs: int | None
    sparse_macs: int | None
    backward_macs: int | None
    sparse_backward_macs: int | None
    activation_bytes: int | None
    backward_activation_bytes: int | None
    output_shape: tuple[int | None, ...] | None


# With their heads in a printed table.
_TOTALS = {
    "parameters": "parameters",
    "macs": "MACs",
    "sparse_macs": "sparse",
    "backward_macs": "backward",
    "sparse_backward_macs": "sparse backward",
    "activation_bytes": "bytes",
    "backward_activation_bytes": "backward bytes",
}


@dataclass(frozen=True)
class Cost(Displayed):
    """The cost of a model, per layer and in total; `prunekit.anatomy.cost.cost.LayerCost` defines each figure.

    Attributes:
        model_name: Name of the model.
        batch_size: Number of examples in the pass.
        layers: One row per layer that computes or returns a new tensor, in the model's order.
        unknown: Layers with an unknown figure, and the reason. Totals leave unknown figures out, and are then lower
            bounds; a total of which no figure is known is None.
    """

    derived: ClassVar = tuple(_TOTALS)
    main_items: ClassVar = "layers"
    makes: ClassVar = "prunekit.delivery.reports.model_sections:cost_sections"

    model_name: str
    batch_size: int
    layers: tuple[LayerCost, ...]
    unknown: tuple[Skipped, ...] = ()

    def verdict(self) -> str:
        """Returns one sentence: parameters and multiply-accumulates."""
        macs = "unknown" if self.macs is None else f"{'at least ' if self.unknown else ''}{self.macs:,}"
        return f"{self.parameters:,} parameters; multiply-accumulates of a batch of {self.batch_size}: {macs}."

    @property
    def parameters(self) -> int:
        """Number of weights; shared weights count once."""
        return sum(row.parameters for row in self.layers)

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates of one forward pass."""
        return self._total("macs")

    @property
    def sparse_macs(self) -> int | None:
        """Multiply-accumulates of one forward pass that skips every zero weight."""
        return None if self.macs is None else sum(row.sparse_macs or 0 for row in self.layers)

    @property
    def backward_macs(self) -> int | None:
        """Multiply-accumulates of one backward pass."""
        return self._total("backward_macs")

    @property
    def sparse_backward_macs(self) -> int | None:
        """Multiply-accumulates of one backward pass that skips every zero weight."""
        return None if self.backward_macs is None else sum(row.sparse_backward_macs or 0 for row in self.layers)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of the layers' output tensors in one forward pass; not the peak memory."""
        return self._total("activation_bytes")

    @property
    def backward_activation_bytes(self) -> int | None:
        """Bytes of the gradients of the layers' output tensors in one backward pass."""
        return self._total("backward_activation_bytes")

    def _total(self, name: str) -> int | None:
        return known_sum(getattr(row, name) for row in self.layers)

    def is_complete(self, name: str) -> bool:
        """Returns True if the figure `name` is known for every layer, so that its total is no lower bound."""
        return all(getattr(row, name) is not None for row in self.layers)

    def __str__(self) -> str:
        """A plain-text table of the layers, with totals and the unknown figures."""
        head = ("layer", "type", *_TOTALS.values())
        rows = [(row.layer, row.type, *(plain(getattr(row, name)) for name in _TOTALS)) for row in self.layers]
        total = ("total", "", *(at_least(getattr(self, name), self.is_complete(name)) for name in _TOTALS))
        title = f"Model {self.model_name!r}, batches of {self.batch_size}: multiply-accumulates, bytes of activations"
        lines = [title, *table(head, rows, total, left={0, 1})]
        return "\n".join([*lines, *(f"not known: {item.name}: {item.reason}" for item in self.unknown)])


# ---------------------------------------------------------------- counting


def nonzero_mask(variable: Any) -> np.ndarray:
    """Boolean array, True where the variable is not zero; -0.0 is zero, NaN is not zero.

    Large variables are compared on their device, so that only the boolean array is copied.
    """
    value = keras.ops.convert_to_tensor(variable)
    if math.prod(value.shape) <= SMALL:
        # Copying a small variable from another device takes less time than an operation there.
        return np.asarray(array_of(value) != 0)
    floating = "float" in keras.backend.standardize_dtype(value.dtype)
    # `ops.not_equal` would convert and cast both sides: most of the time for a small weight.
    return np.asarray(keras.ops.convert_to_numpy(value != 0 if floating else keras.ops.not_equal(value, 0)))


def cost(model: Any, batch_size: int = 1, *, inputs: Any = None) -> Cost:
    """Computes the cost of one forward and one backward pass on a batch, per layer and in total.

    `prunekit.anatomy.cost.cost.LayerCost` defines each figure. On TensorFlow the figures of the backward pass are
    exact. On other backends they are upper bounds: a branch of the model without trained weights may count as a
    trained branch.

    Args:
        model: A built Keras 3 model or layer.
        batch_size: Number of examples in the pass; every count except `parameters` scales with the batch size.
        inputs: Example inputs of the model, or their shapes, as
            `prunekit.anatomy.graph.example_inputs.example_inputs` takes them. Required for models without declared
            inputs, or with None in a declared shape other than the batch axis.

    Returns:
        A `Cost`: multiply-accumulates, bytes and numbers of weights, all exact integers.

    Raises:
        TypeError: `model` is not a Keras 3 model; `inputs` are neither arrays nor tensors nor shapes.
        ValueError: `model` is not built; its input shapes are unknown; `inputs` do not fit; `model` cannot be called on
            such inputs.
    """
    check_built(model)
    batch_size = whole("batch_size", batch_size, 1, wrong_type=ValueError)
    forward = checked_trace(model, batch_size, inputs)
    trained = any(variable.trainable for variable in model.variables)
    traces = _Traces(forward, checked_trace(model, batch_size, inputs, training=True) if trained else Trace())
    weights = weights_in(model)
    seen: dict[str, list[Any]] = {}
    for place in places(model):
        group = seen.setdefault(place.path, [])
        if not any(place.layer is other for other in group):
            group.append(place.layer)
    rows, unknown, done = [], [], set[int]()
    for path, group in seen.items():
        layers = [layer for layer in group if id(layer) not in done]
        done.update(map(id, layers))
        own = [weight for weight in weights if weight.layer_path == path]
        if layers and (own or any(map(traces.works, layers))):
            row, reasons = _row(path, layers, own, traces)
            rows.append(row)
            unknown += [Skipped(path or model.name, reason) for reason in reasons]
    return Cost(model.name, batch_size, tuple(rows), tuple(unknown))


@dataclass(frozen=True)
class _Traces:
    """The traces of a forward pass and of a training step."""

    forward: Trace
    training: Trace

    def works(self, layer: Any) -> bool:
        """Whether a layer without weights has a row: it computes, and is not only a container of other layers."""
        for found in (self.forward, self.training):
            called = id(layer) in found.outputs and not isinstance(layer, keras.layers.InputLayer)
            counts = (found.products, found.output_bytes)
            known = any(count.get(id(layer)) for count in counts)
            if (called and not sublayers(layer)) or known or id(layer) in found.unknown or id(layer) in found.unsized:
                return True
        return False

    def unknown(self, layers: list[Any], own: list[Weight]) -> str:
        """The reason why the multiply-accumulates of these layers are unknown; "" if they are known."""
        for layer in layers:
            for found in (self.forward, self.training):
                if id(layer) in found.unknown:
                    return found.unknown[id(layer)]
        used = self.forward.uses.keys() | self.training.uses.keys()
        if any(weight.spec.prunable and id(weight.variable) not in used for weight in own):
            return NOT_CALLED
        return ""

    def unsized(self, layers: list[Any]) -> str:
        """The reason why the output bytes of these layers are unknown; "" if they are known."""
        reasons = [found.unsized.get(id(layer), "") for found in (self.forward, self.training) for layer in layers]
        return next(filter(None, reasons), "")


def _row(path: str, layers: list[Any], own: list[Weight], traces: _Traces) -> tuple[LayerCost, list[str]]:
    """The layer's row, and the reasons why figures in the row are unknown."""
    forward, training = traces.forward, traces.training

    def total(counts: dict[int, int]) -> int:
        return sum(counts.get(id(layer), 0) for layer in layers)

    macs = sparse = total(forward.products)
    backward = sparse_backward = total(training.gradient_products)
    for weight in own:
        uses, gradient_uses = (counts.get(id(weight.variable), 0) for counts in (forward.uses, training.gradient_uses))
        kept = int(np.count_nonzero(nonzero_mask(weight.values))) if uses or gradient_uses else 0
        macs, sparse = macs + uses * weight.size, sparse + uses * kept
        backward, sparse_backward = backward + gradient_uses * weight.size, sparse_backward + gradient_uses * kept
    unknown, unsized = traces.unknown(layers, own), traces.unsized(layers)
    row = LayerCost(
        layer=path or layers[0].name,
        type=type(layers[0]).__name__,
        parameters=sum(weight.size for weight in own),
        macs=None if unknown else macs,
        sparse_macs=None if unknown else sparse,
        backward_macs=None if unknown else backward,
        sparse_backward_macs=None if unknown else sparse_backward,
        activation_bytes=None if unsized else total(forward.output_bytes),
        backward_activation_bytes=None if unsized else total(training.gradient_bytes),
        output_shape=forward.outputs.get(id(layers[0])),
    )
    return row, [reason for reason in (unknown, unsized) if reason]
