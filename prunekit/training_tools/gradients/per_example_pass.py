"""One forward pass that records the data for each weight's per-example gradients.

While the model runs, every layer that owns trainable weights receives them as constants, and the inputs and outputs of
its calls are kept. If a gradient still reaches a weight, the weight has another use: a tied matrix, a layer inside a
loop. Such weights are differentiated one example at a time through the whole model, so no contribution is lost.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.graph.example_inputs import fixed_batch
from prunekit.anatomy.graph.watching import watching
from prunekit.anatomy.layers.layers import draws_random_numbers, is_repeater, own_variables
from prunekit.anatomy.layers.model_weights import places
from prunekit.core.runtime import backend, compilation, patching
from prunekit.training_tools.gradients.gradient_factors import Contribution, Whole, together
from prunekit.training_tools.gradients.layer_capture import (
    graph_in_scope,
    is_differentiable,
    own_tensors,
    substituted_variables,
)
from prunekit.training_tools.gradients.layer_formulas import formulated, rule_of


@dataclass
class Use:
    """One call of a layer that owns weights.

    Attributes:
        layer: The layer.
        weights: Its trainable weights, by attribute.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        points: The tensors whose gradients are needed: the inputs of the activation function, or the outputs.
    """

    layer: Any
    weights: Mapping[str, Any]
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    points: list[Any] = field(default_factory=list)


class ExamplePass:
    """One forward pass of a model, kept for per-example gradients of its trainable variables.

    Args:
        run: Function (x) -> target: runs the model and returns the tensors to differentiate, such as its output; one
            row per example.
        model: The model that `run` runs.
        x: Tensors, the examples along the first axis.
        training: The `training` argument of the model's call.
        persistent: True if `pull` may be called more than once.
    """

    def __init__(self, run: Callable[[Any], Any], model: Any, x: Any, *, training: bool, persistent: bool = False):
        check_examples_are_apart(model, training)
        self.variables = list(model.trainable_variables)
        self._run, self._model, self._x, self._training = run, model, x, training
        self._owned = _owned(model, self.variables)
        self._constants = {id(v): tf.convert_to_tensor(backend.native(v)) for v in self.variables}
        self._uses: list[Use] = []
        self._aligned = self._probe()
        self._tape = tf.GradientTape(persistent=persistent)
        self._graph, self._inside = graph_in_scope(), False
        self._number = 0
        self._vectorised: dict[Any, Callable[..., Any]] = {}
        with self._tape, watching(self._see):
            self.target = run(x)

    # The forward pass -----------------------------------------------------------------------------------------------

    def _probe(self) -> list[bool]:
        """Returns, per call, True if inputs and outputs have one row per example and no logits bypass the outputs.

        Runs a batch of another size, since an axis of positions may have the same length as the batch by chance.
        """
        batch = keras.tree.flatten(self._x)[0].shape[0]
        if fixed_batch(self._model) is not None:
            # The model accepts no other batch size, so the probe uses the same size.
            size = batch
        else:
            size = 3 if batch == 2 else 2
        aligned: list[bool] = []
        inside: list[Any] = []

        def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
            if inside or id(layer) not in self._owned:
                return original(layer, *args, **kwargs)
            number = len(aligned)
            aligned.append(False)
            with _marked(inside, layer):
                outputs = original(layer, *args, **kwargs)
            # Keras's cross-entropies read the logits before a softmax and bypass the watched outputs.
            past = rule_of(layer) is None and any(
                hasattr(leaf, "_keras_logits") for leaf in keras.tree.flatten(outputs)
            )
            aligned[number] = _have_rows((_first(args, kwargs), outputs), size) and not past
            return outputs

        with watching(see):
            self._run(keras.tree.map_structure(lambda leaf: tf.stack([leaf[0]] * size), self._x))
        return aligned

    def _see(self, original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        weights = self._owned.get(id(layer))
        if self._inside or weights is None:
            return original(layer, *args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number >= len(self._aligned) or not self._aligned[number]:
            return original(layer, *args, **kwargs)
        inputs = _first(args, kwargs)
        if graph_in_scope() is not self._graph or not all(tf.is_tensor(leaf) for leaf in keras.tree.flatten(inputs)):
            return original(layer, *args, **kwargs)
        use = Use(layer, weights, args, kwargs)
        rule = self._rule(use)
        with substituted_variables((weight, self._constants[id(weight)]) for weight in weights.values()):
            if rule is not None and rule.before_activation:
                with patching.shadowed(layer, "activation", self._tap(use, layer.activation)):
                    outputs = original(layer, *args, **kwargs)
            else:
                with self._repeating(layer):
                    outputs = self._named(use, original(layer, *args, **kwargs))
        self._uses.append(use)
        return outputs

    def _rule(self, use: Use) -> Any:
        """Returns the layer's rule if the formulas support its inputs."""
        inputs = _first(use.args, use.kwargs)
        if not isinstance(inputs, tf.Tensor) or not inputs.shape[1:].is_fully_defined():
            return None
        return rule_of(use.layer)

    def _tap(self, use: Use, activation: Callable[..., Any] | None) -> Callable[..., Any]:
        thread = threading.get_ident()

        def tapped(before: Any) -> Any:
            if threading.get_ident() == thread:
                self._tape.watch(before)
                use.points.append(before)
            return before if activation is None else activation(before)

        return tapped

    def _named(self, use: Use, outputs: Any) -> Any:
        def watch(tensor: Any) -> None:
            self._tape.watch(tensor)
            use.points.append(tensor)

        return own_tensors(outputs, watch)

    @contextmanager
    def _repeating(self, layer: Any) -> Iterator[None]:
        """Counts an RNN as one use: its cell is called in a loop, unobserved or once per step."""
        self._inside = is_repeater(layer)
        try:
            yield
        finally:
            self._inside = False

    # The backward pass ----------------------------------------------------------------------------------------------

    def pull(self, cotangent: Any) -> list[Contribution]:
        """Returns each variable's per-example gradients as factors, for a cotangent of the target's structure."""
        points = [point for use in self._uses for point in use.points]
        natives = [backend.native(variable) for variable in self.variables]
        found = self._tape.gradient(self.target, [*points, *natives], output_gradients=cotangent)
        gradients = iter([None if one is None else tf.convert_to_tensor(one) for one in found[: len(points)]])
        stray = {id(v) for v, left in zip(self.variables, found[len(points) :], strict=True) if left is not None}
        parts: dict[int, list[Contribution]] = {id(variable): [] for variable in self.variables}
        for use in self._uses:
            each = [next(gradients) for _ in use.points]
            weights = {name: weight for name, weight in use.weights.items() if id(weight) not in stray}
            if weights and any(gradient is not None for gradient in each):
                for variable, contribution in self._contributions(use, weights, each):
                    parts[id(variable)].append(contribution)
        for variable, gradient in self._through_everything(stray, cotangent):
            parts[id(variable)].append(Whole(gradient))
        return [self._total(variable, parts[id(variable)]) for variable in self.variables]

    def _contributions(self, use: Use, weights: Mapping[str, Any], gradients: list[Any]) -> Iterator[tuple[Any, Any]]:
        if self._rule(use) is not None:
            return formulated(use.layer, _first(use.args, use.kwargs), gradients[0], weights)
        return self._through_layer(use, list(weights.values()), gradients)

    def _total(self, variable: Any, parts: Sequence[Contribution]) -> Contribution:
        if not parts:
            batch = tf.shape(keras.tree.flatten(self._x)[0])[0]
            return Whole(tf.zeros((batch, *variable.shape), variable.dtype))
        return together(parts, tuple(variable.shape))

    def _through_layer(self, use: Use, variables: list[Any], gradients: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Yields the gradients of the layer alone, differentiated one example at a time."""
        _check_repeatable(use.layer, self._training)
        batch = keras.tree.flatten(self._x)[0].shape[0]
        leaves = keras.tree.flatten((use.args, dict(use.kwargs)))
        rows = [_is_row(leaf, batch) for leaf in leaves]
        masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
        sliced = [leaf for leaf, row in zip(leaves, rows, strict=True) if row]
        sliced_masks = [mask for mask, row in zip(masks, rows, strict=True) if row and mask is not None]

        def call(parts: list[Any], part_masks: list[Any]) -> Any:
            values, with_masks = iter(parts), iter(part_masks)
            whole = []
            for leaf, mask, row in zip(leaves, masks, rows, strict=True):
                value = next(values) if row else leaf
                if mask is not None:
                    value._keras_mask = next(with_masks) if row else mask
                whole.append(value)
            args, kwargs = keras.tree.pack_sequence_as((use.args, dict(use.kwargs)), whole)
            return use.layer(*args, **kwargs, **self._training_argument(use))

        each = self._one_at_a_time(use, call, (sliced, sliced_masks), variables, gradients)
        yield from ((v, Whole(gradient)) for v, gradient in zip(variables, each, strict=True))

    def _one_at_a_time(
        self, place: Any, call: Callable[..., Any], inputs: tuple, variables: list[Any], gradients: list[Any]
    ) -> list[Any]:
        """Returns the per-example gradients of the outputs of `call`; traced once for all pulls."""
        wanted = [number for number, gradient in enumerate(gradients) if gradient is not None]
        key = (id(place), *wanted, *map(id, variables))
        if key not in self._vectorised:
            self._vectorised[key] = _mapped(call, variables, wanted)
        return self._vectorised[key]((inputs, [gradients[number] for number in wanted]))

    def _training_argument(self, use: Use) -> dict[str, bool]:
        # In the first pass the layer received `training` from the layers around it.
        takes = getattr(use.layer, "_call_has_training_arg", False)
        given = "training" in use.kwargs
        return {"training": self._training} if takes and not given else {}

    def _through_everything(self, stray: set[int], cotangent: Any) -> Iterator[tuple[Any, Any]]:
        variables = [variable for variable in self.variables if id(variable) in stray]
        if not variables:
            return
        _check_repeatable(self._model, self._training)
        leaves = keras.tree.flatten(self._x)
        each = self._one_at_a_time(
            self,
            lambda parts, _: self._run(keras.tree.pack_sequence_as(self._x, parts)),
            (leaves, []),
            variables,
            keras.tree.flatten(cotangent),
        )
        yield from zip(variables, each, strict=True)


def _mapped(call: Callable[..., Any], variables: list[Any], wanted: list[int]) -> Callable[[Any], list[Any]]:
    """Returns a function (inputs, cotangents) -> gradients of the outputs of `call`, each example as its own batch."""

    def one(parts: Any) -> Any:
        (leaves, masks), cotangents = keras.tree.map_structure(lambda leaf: leaf[None], parts)
        copies = [tf.identity(backend.native(variable)) for variable in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(copies)
            with substituted_variables(zip(variables, copies, strict=True)):
                outputs = [leaf for leaf in keras.tree.flatten(call(leaves, masks)) if is_differentiable(leaf)]
        chosen = [outputs[place] for place in wanted]
        found = tape.gradient(chosen, copies, cotangents, unconnected_gradients="zero")
        return [tf.convert_to_tensor(gradient) for gradient in found]

    if not tf.executing_eagerly():
        return lambda parts: tf.vectorized_map(one, parts)
    # Vectorising an RNN takes seconds and would be repeated in every call; a loop in a graph traces quickly.
    signature = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    return compilation.compiled(lambda parts: tf.map_fn(one, parts, fn_output_signature=signature))


# ---------------------------------------------------------------- looking at models and calls


def _owned(model: Any, trainable: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Returns {id of a layer: its trainable weights by attribute}; an RNN also owns the weights of its cell."""
    wanted = {id(variable) for variable in trainable}
    owned: dict[int, dict[str, Any]] = {}
    for place in places(model):
        layer = place.layer
        if id(layer) in owned:
            continue
        if is_repeater(layer):
            weights = {str(number): variable for number, variable in enumerate(layer.trainable_variables)}
        else:
            weights = {label: variable for variable, _, label in own_variables(layer)}
        weights = {name: variable for name, variable in weights.items() if id(variable) in wanted}
        if weights:
            owned[id(layer)] = weights
    return owned


def _first(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_row(leaf: Any, batch: int | None) -> bool:
    return tf.is_tensor(leaf) and leaf.shape.rank is not None and leaf.shape.rank > 0 and leaf.shape[0] == batch


def _have_rows(structure: Any, size: int) -> bool:
    leaves = [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
    return bool(leaves) and all(_is_row(leaf, size) for leaf in leaves)


@contextmanager
def _marked(inside: list[Any], layer: Any) -> Iterator[None]:
    if is_repeater(layer):
        inside.append(layer)
    try:
        yield
    finally:
        inside.clear()


def check_examples_are_apart(model: Any, training: bool) -> None:
    """Raises if batch statistics in training mode would mix the examples.

    Raises:
        ValueError: `training` is True and the model has a BatchNormalization that is not frozen.
    """
    if not training:
        return
    for place in places(model):
        if isinstance(place.layer, keras.layers.BatchNormalization) and place.layer.trainable:
            raise ValueError(
                "In training mode BatchNormalization makes each example's output depend on the whole batch, so there "
                f"is no gradient of one example. Received: training=True and the layer {place.path!r}. Leave "
                "`training` at False, or freeze the layer."
            )


def _check_repeatable(layer: Any, training: bool) -> None:
    """Raises if the layer would draw other random numbers when it runs again, one example at a time."""
    if not training:
        return
    drawing = [place.layer for place in places(layer) if draws_random_numbers(place.layer)]
    if drawing:
        raise ValueError(
            "Per-example gradients of this layer need it to run again, where it would draw other random numbers. "
            f"Received: training=True and the layer {drawing[0].name!r}. Leave `training` at False."
        )
