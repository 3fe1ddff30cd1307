"""Changes a trained model layer by layer on calibration data, and repairs what each change does to the outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.reports import LayerError
from prunekit.anatomy.targets import Target
from prunekit.core.calibration_walk import Call, Pair, walk
from prunekit.core.layer_fit import Solver
from prunekit.core.layer_inputs import LayerMoments, observing_inputs, rows_in_parts
from prunekit.core.layer_products import product_of
from prunekit.sparsity.array_ops import array_of

# Told after each step: (done, total, name of the weight).
Progress = Callable[[int, int, str], None]


class _Seen(BaseException):
    """Ends a forward pass once the wanted inputs were seen; no Exception, because Keras rewrites those."""


class LayerwiseRepair:
    """Solves the targets of a model in the order in which the model calls their layers.

    Each layer is solved for the outputs that it had in the model as it was, from the inputs that it receives in the
    model as it is by then. Then its bias is corrected by the mean error that is left, and the moving statistics of
    batch normalizations after it are moved by the change of the statistics of their inputs on the calibration data.

    The model is not changed: the new values are read in its place while it runs, and an interruption loses nothing.

    Args:
        model: The model.
        targets: The weights.
        solver: Finds the new value of one weight.
        progress: Told of each solved weight.
        values: Values, as (variable, array), that variables besides the targets have from the start.

    Attributes:
        masks: Mask of each solved weight, by name.
        values: New values, as (variable, tensor): of the weights, of biases, and of moving statistics.
        errors: Error of each layer, by the name of the weight.

    Memory, besides the activations of `walk`: a copy of the targets; for the largest layer of K inputs, about
        40 * groups * K ** 2 bytes.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        solver: Solver,
        progress: Progress | None = None,
        values: Sequence[tuple[Any, Any]] = (),
    ):
        self.model, self.targets, self._solver = model, tuple(targets), solver
        self._tell = progress or (lambda done, total, name: None)
        self._products = [product_of(target) for target in self.targets]
        self._done: set[int] = set()
        self._values: dict[int, tuple[Any, Any]] = {}
        for variable, value in values:
            self._set(variable, value)
        self.masks: dict[str, np.ndarray] = {}
        self.errors: dict[str, LayerError] = {}

    @property
    def values(self) -> list[tuple[Any, Any]]:
        return list(self._values.values())

    def _set(self, variable: Any, value: Any) -> None:
        self._values[id(variable)] = variable, ops.cast(ops.convert_to_tensor(value), variable.dtype)

    def _get(self, variable: Any) -> np.ndarray:
        _, value = self._values.get(id(variable), (None, variable))
        return np.array(array_of(ops.convert_to_tensor(value)))

    def run(self, batches: Sequence[Any]) -> None:
        """Finds the new values of all targets.

        Args:
            batches: Inputs of the model.

        Raises:
            ValueError: The inputs do not fit the model; the model does not call the layer of a target on them.
        """
        walk(self.model, batches, self._visit)
        missed = [target.name for target in self.targets if target.name not in self.errors]
        if missed:
            raise ValueError(
                f"The layers of {', '.join(missed[:5])} were not called. Received: a model that calls them only in "
                "training, or inside a loop of the backend. Leave the weights out with `exclude`."
            )

    # One call of the graph --------------------------------------------------------------------------------------------

    def _visit(self, call: Call) -> list[Pair]:
        inside = _layers_in(call.operation)
        for stage in self._stages(call, inside):
            stage()
        return [self._outputs(call.operation, pair) for pair in call.arguments]

    def _outputs(self, operation: Any, arguments: Pair) -> Pair:
        before = _run(operation, arguments.before)
        if arguments.same and not self._changes(operation):
            return Pair(before, before)
        with keras.StatelessScope(state_mapping=self.values):
            return Pair(before, _run(operation, arguments.after))

    def _changes(self, operation: Any) -> bool:
        return any(id(variable) in self._values for variable in getattr(operation, "variables", ()))

    def _stages(self, call: Call, inside: Sequence[Any]) -> list[Callable[[], None]]:
        """Returns what is to be done in a call, in the order in which its layers are called."""
        of_layer: dict[int, list[int]] = {}
        for index, target in enumerate(self.targets):
            of_layer.setdefault(id(target.layer), []).append(index)
        wanted = [layer for layer in inside if id(layer) not in self._done]
        wanted = [layer for layer in wanted if id(layer) in of_layer or self._follows_statistics(layer)]
        stages: list[Callable[[], None]] = []
        for layer, calls in self._order_of_calls(call, wanted) if wanted else ():
            # A layer that is called again elsewhere in the graph keeps the values found at its first call.
            self._done.add(id(layer))
            stages += [functools.partial(self._solve, call, index, calls) for index in of_layer.get(id(layer), ())]
            if self._follows_statistics(layer):
                stages.append(functools.partial(self._move_statistics, call, layer, calls))
        return stages

    def _follows_statistics(self, layer: Any) -> bool:
        return self._solver.repairs and isinstance(layer, keras.layers.BatchNormalization)

    def _order_of_calls(self, call: Call, wanted: Sequence[Any]) -> list[tuple[Any, int]]:
        """Returns (layer, number of calls) of the layers that the call reaches, in the order of their first call."""
        if len(wanted) == 1 and wanted[0] is call.operation:
            return [(call.operation, 1)]
        seen: dict[int, list[Any]] = {}
        with observing_inputs(wanted, lambda layer, args: seen.setdefault(id(layer), []).append(layer)):
            _run(call.operation, call.arguments[0].before)
        return [(layers[0], len(layers)) for layers in seen.values()]

    # One weight -------------------------------------------------------------------------------------------------------

    def _solve(self, call: Call, index: int, calls: int) -> None:
        target, product = self.targets[index], self._products[index]
        weight = self._get(target.variable)
        moments = LayerMoments(product, product.matrix(weight.astype("float32")))
        for pair in call.arguments:
            for arguments in self._inputs(call, target.layer, calls, pair):
                before = rows_in_parts(product, arguments.before)
                moments.observe(before, None if arguments.same else rows_in_parts(product, arguments.after))
        moments.finish()
        found = self._solver.solve(index, product, weight, moments)
        if found.weight is not weight:
            self._set(target.variable, found.weight)
        bias = None if found.bias_shift is None else product.bias(found.bias_shift)
        if bias is not None:
            variable = target.layer.bias
            self._set(variable, self._get(variable).astype("float64") + bias)
        self.masks[target.name] = found.mask
        self.errors[target.name] = LayerError(target.name, found.error)
        self._tell(len(self.errors), len(self.targets), target.name)

    def _inputs(self, call: Call, layer: Any, calls: int, arguments: Pair) -> list[Pair]:
        """Returns the arguments of each call of an inner layer, for one batch."""
        if layer is call.operation:
            return [arguments.each(lambda given: given[0] or tuple(given[1].values()))]
        before = self._see(call.operation, layer, calls, arguments.before, ())
        if arguments.same and not self._changes(call.operation):
            return [Pair(args, args) for args in before]
        after = self._see(call.operation, layer, calls, arguments.after, self.values)
        return [Pair(*args) for args in zip(before, after, strict=True)]

    @staticmethod
    def _see(operation: Any, layer: Any, calls: int, given: Any, values: Sequence[Any]) -> list[tuple]:
        seen: list[tuple] = []

        def see(_: Any, args: tuple) -> None:
            seen.append(args)
            if len(seen) == calls:
                raise _Seen

        try:
            with observing_inputs([layer], see, values):
                _run(operation, given)
        except _Seen:
            pass
        return seen

    # Batch normalization ----------------------------------------------------------------------------------------------

    def _move_statistics(self, call: Call, layer: Any, calls: int) -> None:
        """Moves the moving mean by the change of the mean, and scales the moving variance by that of the variance."""
        before, after, same = _Statistics(layer), _Statistics(layer), True
        for pair in call.arguments:
            for arguments in self._inputs(call, layer, calls, pair):
                same = same and arguments.same
                before.observe(arguments.before[0])
                after.observe(arguments.after[0])
        if same:
            return
        mean, variance = layer.moving_mean, layer.moving_variance
        known = before.variance > 0
        ratio = np.divide(after.variance, before.variance, out=np.ones_like(after.variance), where=known)
        self._set(mean, self._get(mean) + after.mean - before.mean)
        self._set(variance, self._get(variance) * ratio)


class _Statistics:
    """Mean and variance of the inputs of a batch normalization, per channel."""

    def __init__(self, layer: Any):
        self._axis, self._rows, self._sum, self._squares = layer.axis, 0, 0.0, 0.0

    def observe(self, inputs: Any) -> None:
        channels = inputs.shape[self._axis]
        flat = np.moveaxis(array_of(ops.cast(inputs, "float32")), self._axis, -1).reshape(-1, channels)
        self._rows += len(flat)
        self._sum = self._sum + flat.sum(axis=0, dtype="float64")
        self._squares = self._squares + np.square(flat, dtype="float64").sum(axis=0)

    @property
    def mean(self) -> Any:
        return self._sum / self._rows

    @property
    def variance(self) -> Any:
        return np.maximum(self._squares / self._rows - np.square(self.mean), 0.0)


def _run(operation: Any, given: Any) -> Any:
    args, kwargs = given
    return operation(*args, **kwargs)


def _layers_in(operation: Any) -> list[Any]:
    """Returns the layers whose calls can be observed in a call of the operation; [] for an operation without layers."""
    if not isinstance(operation, keras.layers.Layer):
        return []
    return [one for one in operation._flatten_layers() if not isinstance(one, keras.layers.RNN)]
