"""What one forward and one backward pass of a model cost: multiply-accumulates and the bytes of activations.

Counted are the multiply-accumulates of kernels and of the products inside attention and Dot layers. Not counted:
biases, normalisation, activations, pooling, augmentation of images, and `keras.ops` called outside a layer. Padding
counts as data.
"""

from __future__ import annotations

import reprlib
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers import sublayers
from prunekit.anatomy.tables import plain, table
from prunekit.anatomy.targets import Skipped, Weight, check_built, places, weights_in
from prunekit.anatomy.tracing import Trace, checked_trace


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, over all calls of it in one pass.

    The backward pass is that of a training step with `training=True` whose loss depends on every output of the model.
    It does what the gradients of the trained weights need and no more: the gradient of a weight if it is trained, that
    of an activation if trained weights were used on the way to it. Each gradient takes as many multiply-accumulates as
    the forward product that it belongs to. The steps of a recurrent layer count alike.

    Attributes:
        layer: Readable path, such as "block/conv_1".
        type: Name of its class.
        parameters: Number of weights that are its own (for RNN layers, its cell's too); a shared one counts once.
        macs: Multiply-accumulates of one forward pass; None where unknown.
        sparse_macs: The part of them whose weight is not zero; products between activations count whole.
        backward_macs: Multiply-accumulates of one backward pass; None where unknown.
        sparse_backward_macs: The part of them whose weight is not zero: gradients of activations multiply with the
            weights, and gradients of zero weights are left out, as for pruned weights, whose gradient is masked.
        activation_bytes: Bytes of the tensors that the layer puts out in one forward pass (not of what it holds while
            it computes), each in its own type, all steps of a recurrent layer; None where unknown. A tensor that
            another layer put out before, such as the output of the last layer inside a block, counts for that one.
        backward_activation_bytes: Bytes of the gradients of the tensors that the layer puts out in training; None
            where unknown. Zero weights change neither: activations and their gradients are stored dense.
        output_shape: Shape of the first output of the first call, batch included; None if it was not called.
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
class Cost:
    """What a model costs, per layer and in total; `prunekit.anatomy.cost.LayerCost` says what each figure counts.

    Attributes:
        model: Name of the model.
        batch_size: Number of examples in the pass.
        layers: One row per layer that works or puts out a tensor of its own, in the model's order.
        unknown: Layers of which a figure is not known, and why; the totals leave that figure out.
    """

    model: str
    batch_size: int
    layers: tuple[LayerCost, ...]
    unknown: tuple[Skipped, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights, each shared one once."""
        return sum(row.parameters for row in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass."""
        return sum(row.macs or 0 for row in self.layers)

    @property
    def sparse_macs(self) -> int:
        """Multiply-accumulates of one forward pass that skips every zero weight."""
        return sum(row.sparse_macs or 0 for row in self.layers)

    @property
    def backward_macs(self) -> int:
        """Multiply-accumulates of one backward pass."""
        return sum(row.backward_macs or 0 for row in self.layers)

    @property
    def sparse_backward_macs(self) -> int:
        """Multiply-accumulates of one backward pass that skips every zero weight."""
        return sum(row.sparse_backward_macs or 0 for row in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes that the layers put out in one forward pass; not the memory in use at one time."""
        return sum(row.activation_bytes or 0 for row in self.layers)

    @property
    def backward_activation_bytes(self) -> int:
        """Bytes of the gradients of what the layers put out, in one backward pass."""
        return sum(row.backward_activation_bytes or 0 for row in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Everything, totals included, as JSON can hold it."""
        return asdict(self) | {name: getattr(self, name) for name in _TOTALS}

    def __str__(self) -> str:
        """A table of the layers as plain text, with totals, and what is not known."""
        head = ("layer", "type", *_TOTALS.values())
        rows = [(row.layer, row.type, *(plain(getattr(row, name)) for name in _TOTALS)) for row in self.layers]
        total = ("total", "", *(plain(getattr(self, name)) for name in _TOTALS))
        title = f"Model {self.model!r}, batches of {self.batch_size}: multiply-accumulates, bytes of activations"
        lines = [title, *table(head, rows, total, left={0, 1})]
        return "\n".join([*lines, *(f"not known: {item.name}: {item.reason}" for item in self.unknown)])


# ---------------------------------------------------------------- counting


def nonzero_mask(variable: Any) -> np.ndarray:
    """Where a variable is not zero, compared on the device that holds it; -0.0 is a zero, NaN is none."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.not_equal(keras.ops.convert_to_tensor(variable), 0)))


def cost(model: Any, batch_size: int = 1, *, inputs: Any = None) -> Cost:
    """What one forward and one backward pass on a batch cost, per layer and in total.

    `prunekit.anatomy.cost.LayerCost` says what each figure counts. On TensorFlow the figures of the backward pass are
    exact; on other backends, where a branch of the model that trained weights do not reach may count as one that they
    do, upper bounds.

    Args:
        model: A built Keras 3 model or layer.
        batch_size: Number of examples in the pass; every count scales with it.
        inputs: An example of the model's inputs: arrays or tensors, of which only types and the shape after the first
            axis are read. Needed for models that do not declare their inputs, or declare sizes other than the batch as
            None.

    Returns:
        A `Cost`: multiply-accumulates, bytes and numbers of weights, all exact integers.

    Raises:
        TypeError: It is no Keras 3 model; `inputs` are no arrays.
        ValueError: It is not built; the sizes of its inputs are not known; it cannot be called on such inputs.
    """
    check_built(model)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"A batch has at least one example. Received: batch_size={reprlib.repr(batch_size)}.")
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
    """What a forward pass showed, and what a training step does."""

    forward: Trace
    training: Trace

    def works(self, layer: Any) -> bool:
        """Whether a layer without weights has a row: it does something, and is no mere container of other layers."""
        for found in (self.forward, self.training):
            called = id(layer) in found.outputs and not isinstance(layer, keras.layers.InputLayer)
            counts = (found.products, found.output_bytes)
            known = any(count.get(id(layer)) for count in counts)
            if (called and not sublayers(layer)) or known or id(layer) in found.unknown or id(layer) in found.unsized:
                return True
        return False

    def unknown(self, layers: list[Any], own: list[Weight]) -> str:
        """Why the multiply-accumulates of these layers are not known; "" if they are."""
        for layer in layers:
            for found in (self.forward, self.training):
                if id(layer) in found.unknown:
                    return found.unknown[id(layer)]
        used = self.forward.uses.keys() | self.training.uses.keys()
        if any(weight.spec.prunable and id(weight.variable) not in used for weight in own):
            return "the model did not call it"
        return ""

    def unsized(self, layers: list[Any]) -> str:
        """Why the bytes that they put out are not known; "" if they are."""
        reasons = [found.unsized.get(id(layer), "") for found in (self.forward, self.training) for layer in layers]
        return next(filter(None, reasons), "")


def _row(path: str, layers: list[Any], own: list[Weight], traces: _Traces) -> tuple[LayerCost, list[str]]:
    """The row, and why figures in it are not known."""
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
