"""Counts the operations and bytes of a model's layer calls, forward and backward, in a pass on symbolic tensors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

from prunekit.anatomy.graph.example_inputs import arrays_in, example_inputs, symbolic_call
from prunekit.anatomy.graph.flow import Flow, LayerCall, SymbolicPass, gradient_flow
from prunekit.anatomy.graph.model_graph import calls_of, graph_of, tensors_in
from prunekit.anatomy.graph.watching import watching_outside_loops
from prunekit.anatomy.layers.counting import LayerShapes, Shape, Sources
from prunekit.anatomy.layers.layers import is_repeater, macs, multiplied_by, own_variables, steps_of, sublayers

# Reason why the multiply-accumulates of a layer without calls are unknown.
NOT_CALLED = "the model did not call it"


def _type_name(dtype: Any) -> str:
    try:
        return keras.backend.standardize_dtype(dtype)
    except ValueError:  # TensorFlow's handles and lists
        return str(dtype)


def item_bytes(dtype: Any) -> int:
    """Returns the bytes of one number of this dtype; 0 for text and other dtypes without a fixed size."""
    # NumPy has no bfloat16 or float8; the number in the dtype's name is its size in bits.
    name = _type_name(dtype)
    bits = re.search(r"\d+", name)
    return int(bits.group()) // 8 if bits else int(name == "bool")


@dataclass
class Trace:
    """Counts from one symbolic pass over a model.

    Attributes:
        batch_size: Number of examples in the pass.
        trained: The variables that are trained.
        uses: id of a variable -> multiply-accumulates per element of the variable, forward.
        gradient_uses: The same in the backward pass, for the gradients of the weights and of the activations together.
        products: id of a layer -> multiply-accumulates between activations, forward.
        gradient_products: The same in the backward pass.
        outputs: id of a layer -> shape of its first output.
        output_bytes: id of a layer -> bytes of the outputs of its calls; a tensor that passes through several layers
            counts once, for the innermost layer.
        gradient_bytes: id of a layer -> bytes of the gradients of these tensors.
        unknown: id of a layer -> reason why its multiply-accumulates are unknown.
        unsized: id of a layer -> reason why the bytes of its outputs are unknown.
    """

    batch_size: int = 1
    trained: tuple[Any, ...] = ()
    uses: dict[int, int] = field(default_factory=dict)
    gradient_uses: dict[int, int] = field(default_factory=dict)
    products: dict[int, int] = field(default_factory=dict)
    gradient_products: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    output_bytes: dict[int, int] = field(default_factory=dict)
    gradient_bytes: dict[int, int] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)
    unsized: dict[int, str] = field(default_factory=dict)

    def add(self, seen: LayerCall, flow: Flow, times: int) -> LayerShapes:
        """Adds the multiply-accumulates of `times` calls equal to `seen` to the counts; returns the call's shapes."""
        layer, key = seen.layer, id(seen.layer)
        types = tuple(_type_name(tensor.dtype) for tensor in seen.inputs)
        call = LayerShapes(tuple(map(self._static, seen.inputs)), tuple(map(self._static, seen.outputs)), types)
        counted = macs(layer, call)
        self.outputs.setdefault(key, tuple(seen.outputs[0].shape) if seen.outputs else ())
        if counted is None:
            mode = getattr(layer, "quantization_mode", None)
            kind = type(layer).__name__ + (f" quantized to {mode}" if mode else "")
            self.unknown[key] = f"prunekit has no formula for the multiply-accumulates of {kind}"
            return call
        uses, products = counted
        dynamic = any(None in tuple(tensor.shape)[1:] for tensor in (*seen.inputs, *seen.outputs))
        if dynamic and (any(product.macs for product in products) or any(uses.values())):
            self.unknown[key] = "the shapes that it is called on are not known before the model runs"
            return call
        needed = _Needed(self, seen, flow)
        _increase(self.products, key, times * sum(product.macs for product in products))
        for product in products:
            _increase(self.gradient_products, key, times * product.macs * sum(map(needed.of, product.factors)))
        factors = multiplied_by(layer, uses)
        for variable, attribute, _ in own_variables(layer):
            each = times * uses.get(attribute, 0)
            _increase(self.uses, id(variable), each)
            if each:
                gradients = needed.weight(variable) + needed.of(factors[attribute])
                _increase(self.gradient_uses, id(variable), each * gradients)
        return call

    def add_bytes(self, seen: LayerCall, flow: Flow, times: int, known: set[int]) -> None:
        """Adds the output bytes of `times` calls equal to `seen` to the counts, without tensors already in `known`."""
        for tensor, has_gradient in zip(seen.outputs, flow.receives(seen), strict=True):
            if id(tensor) in known:
                continue
            known.add(id(tensor))
            bytes_of_one = item_bytes(tensor.dtype)
            if not bytes_of_one or _irregular(tensor) or None in tuple(tensor.shape)[1:]:
                self.unsized[id(seen.layer)] = "the size of its outputs is not known before the model runs"
                continue
            size = times * bytes_of_one * math.prod(self._static(tensor))
            _increase(self.output_bytes, id(seen.layer), size)
            _increase(self.gradient_bytes, id(seen.layer), size * has_gradient)

    def _static(self, tensor: Any) -> Shape:
        # Layers that process strings lose the batch size; in other layers an open size makes the count unknown.
        return tuple(
            int(length) if length is not None else (1 if axis else self.batch_size)
            for axis, length in enumerate(tensor.shape)
        )


def _increase(counts: dict[int, int], key: int, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount


def _irregular(tensor: Any) -> bool:
    """Returns True if the tensor is sparse or ragged."""
    return any(hasattr(tensor, name) for name in ("dense_shape", "row_splits", "nse"))


class _Needed:
    """Which gradients the backward pass of one call needs."""

    def __init__(self, found: Trace, seen: LayerCall, flow: Flow) -> None:
        self._layer, self._inputs = seen.layer, flow.depends(seen)
        self._any = any(flow.receives(seen))
        self._trained = frozenset(map(id, found.trained))
        self._own = own_variables(seen.layer)

    def weight(self, variable: Any) -> bool:
        """Returns True if the backward pass needs the gradient of the weight."""
        return self._any and id(variable) in self._trained

    def of(self, sources: Sources) -> bool:
        """Returns True if the backward pass needs the gradient of a factor that is computed from `sources`."""
        return self._any and any(
            source < len(self._inputs) and self._inputs[source]
            if isinstance(source, int)
            else any(map(self.weight, self._variables(source)))
            for source in sources
        )

    def _variables(self, attribute: str) -> list[Any]:
        own = [variable for variable, name, _ in self._own if name == attribute]
        return own or getattr(getattr(self._layer, attribute, None), "variables", [])


# ---------------------------------------------------------------- passes


class _Symbolic(keras.Operation):
    """Runs a function on symbolic tensors (without values) and discards its state updates."""

    received: list[Any]
    returned: list[Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._function(*args, **kwargs)
        self.received, self.returned = arrays_in((args, kwargs)), arrays_in(outputs)
        return outputs


@dataclass(frozen=True)
class _Pending:
    """A pass that is still to be run.

    Attributes:
        function: The function to call.
        args: Its positional arguments, with symbolic tensors.
        kwargs: Its keyword arguments, with symbolic tensors.
        times: Number of times that the model runs the pass.
        dependent: For each tensor in the arguments, True if it depends on trained weights; empty if none does.
        needed: True if the loss depends on the outputs.
        repeated: True if all outputs but the first are inputs of the next repetition.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict
    times: int = 1
    dependent: tuple[bool, ...] = ()
    needed: bool = True
    repeated: bool = False


def _in_order(layer: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Returns the arguments in the order of the signature: attention may receive value and key by name."""
    try:
        return list(inspect.signature(layer.call).bind(*args, **kwargs).arguments.values())
    except TypeError:  # arguments that Keras takes for itself
        return [*args, *kwargs.values()]


def trace(model: Any, prepared: tuple[tuple, dict, int], *, training: bool = False) -> Trace:
    """Runs the model once on symbolic tensors and counts every layer call; each call of a shared layer counts."""
    shapes = [tuple(tensor.shape) for tensor in arrays_in(prepared[:2])]
    trained = tuple(variable for variable in model.variables if variable.trainable)
    found = Trace(shapes[0][0] if shapes and shapes[0] else 1, trained)
    pending = [_Pending(model, *prepared)]
    while pending:
        pending.extend(_one_pass(found, pending.pop(), training=training))
    return found


def _one_pass(found: Trace, one: _Pending, *, training: bool) -> list[_Pending]:
    """Counts the layer calls of the pass and returns the inner passes that are still to be run."""
    calls: list[LayerCall] = []

    def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        outputs = original(layer, *args, **kwargs)
        calls.append(LayerCall(layer, tuple(arrays_in(_in_order(layer, args, kwargs))), tuple(arrays_in(outputs))))
        return outputs

    symbolic = _Symbolic(one.function)
    # A separate pass counts the inner layers of loops.
    with watching_outside_loops(see):
        symbolic.compute_output_spec(*one.args, **one.kwargs, training=training)
    inputs = symbolic.received
    dependent = one.dependent or (False,) * len(inputs)
    flow = gradient_flow(
        SymbolicPass(calls, inputs, dependent, symbolic.returned, found.trained, one.needed, one.repeated)
    )
    known = set(map(id, inputs))
    inner = []
    for seen in calls:
        call = found.add(seen, flow, one.times)
        found.add_bytes(seen, flow, one.times, known)
        inner += _steps(seen, call, flow, one.times)
    return inner


def _steps(seen: LayerCall, call: LayerShapes, flow: Flow, times: int) -> list[_Pending]:
    """Returns the pass over one time step for a layer that iterates over time steps; an empty list for others."""
    steps = steps_of(seen.layer, call)
    if steps is None:
        return []
    features = keras.KerasTensor(steps.shape, call.types[0])
    state = [_Symbolic(steps.state).compute_output_spec()] if steps.state is not None else []
    first, *given = flow.depends(seen)
    dependent = (first, *[any(given) for _ in arrays_in(state)])
    needed, repeated = any(flow.receives(seen)), bool(state)
    return [_Pending(steps.layer, (features, *state), {}, times * steps.number, dependent, needed, repeated)]


# ---------------------------------------------------------------- entry points


def checked_trace(model: Any, batch_size: int, inputs: Any, *, training: bool = False) -> Trace:
    """Returns `trace(...)`; turns exceptions from the user's layers into a ValueError that names the remedy."""
    if type(model).call in (keras.Layer.call, keras.Model.call):
        parts = ", ".join(f"{part.name!r}" for part in sublayers(model))
        raise ValueError(
            f"The model {model.name!r} has no `call`, so it is not counted as a whole. Count its parts, such as "
            f"pk.cost(model.encoder), one by one. Its parts are: {parts}."
        )
    prepared = symbolic_call(model, batch_size, inputs)
    try:
        return trace(model, prepared, training=training)
    except Exception as error:
        # Keras puts a paragraph about overriding methods before the actual error.
        cause = str(error).split("Error encountered:\n\n")[-1].strip()
        raise ValueError(
            f"The model {model.name!r} could not be traced on symbolic tensors. Received: "
            f"{type(error).__name__}: {cause}. Pass an example of its inputs as `inputs`, or describe the layer that "
            "fails with `compute_output_shape`."
        ) from error


def recorded_calls(model: Any) -> list[LayerCall] | None:
    """Returns the layer calls that Keras recorded when the model was made; None if only running it shows all calls.

    Running is necessary for subclassed models, for layers of users and layers with sublayers (whose `call` may call
    other layers), for operations outside layers (which may change the batch axis), and for sizes that the model leaves
    open, other than the batch size.
    """
    if graph_of(model) is None or own_variables(model):
        return None
    nodes = calls_of(model)

    def seen(node: Any) -> LayerCall:
        given = _in_order(node.operation, node.arguments.args, node.arguments.kwargs)
        return LayerCall(node.operation, tuple(tensors_in(given)), tuple(node.outputs))

    return [seen(node) for node in nodes] if all(map(_is_plain, nodes)) else None


def _is_plain(node: Any) -> bool:
    layer = node.operation
    own = isinstance(layer, keras.Layer) and type(layer).__module__.startswith("keras.")
    if not own or isinstance(layer, keras.layers.Lambda) or "call" in vars(layer):
        return False
    sized = all(None not in tensor.shape[1:] for tensor in (*node.input_tensors, *node.outputs))
    return sized and not sublayers(layer) and not is_repeater(layer)


class _NoGradients:
    """The flow of a pass whose gradients are not counted."""

    def depends(self, call: LayerCall) -> tuple[bool, ...]:
        return (False,) * len(call.inputs)

    def receives(self, call: LayerCall) -> tuple[bool, ...]:
        return (False,) * len(call.outputs)


def forward_trace(model: Any, batch_size: int, inputs: Any = None) -> Trace:
    """Returns the counts `uses`, `products` and `unknown` of a forward pass; runs the model only where necessary.

    Raises:
        TypeError, ValueError: As `checked_trace`.
    """
    if inputs is not None:
        inputs = example_inputs(model, inputs)
        # A recorded graph is read without them.
        symbolic_call(model, batch_size, inputs)
    calls = recorded_calls(model)
    if calls is None:
        return checked_trace(model, batch_size, inputs)
    found = Trace(batch_size)
    for seen in calls:
        found.add(seen, _NoGradients(), 1)
    return found
