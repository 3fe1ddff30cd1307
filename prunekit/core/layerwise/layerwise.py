"""Changes a trained model layer by layer on calibration data, and repairs what each change does to the outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import LayerError
from prunekit.core.data.batch_parts import in_parts
from prunekit.core.data.moving_statistics import ChannelStatistics, followed
from prunekit.core.layerwise.calibration_walk import Outputs, Pair, WalkedCall, walk
from prunekit.core.layerwise.inner_inputs import InnerInputs, run
from prunekit.core.layerwise.layer_fit import Solver
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of

# Largest output of a call in one batch, as a share of these bytes.
_SHARE = 1 / 32

# Told after each step: (done, total, name of the weight).
Progress = Callable[[int, int, str], None]


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
        memory: Largest number of bytes of activations that are kept; less memory costs time, not accuracy.

    Attributes:
        masks: Mask of each solved weight, by name.
        values: New values, as (variable, tensor): of the weights, of biases, and of moving statistics.
        errors: Error of each layer, by the name of the weight.

    Memory, besides the activations: a copy of the targets; for the largest layer of K inputs, about
        40 * groups * K ** 2 bytes.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        solver: Solver,
        progress: Progress | None = None,
        values: Sequence[tuple[Any, Any]] = (),
        memory: float = MEMORY,
    ):
        self._memory = memory
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
        walk(self.model, in_parts(self.model, batches, self._memory * _SHARE), self._visit, self._memory)
        missed = [target.name for target in self.targets if target.name not in self.errors]
        if missed:
            raise ValueError(
                f"The layers of {', '.join(missed[:5])} were not called. Received: a model that calls them only in "
                "training, or inside a loop of the backend. Leave the weights out with `exclude`."
            )

    # One call of the graph --------------------------------------------------------------------------------------------

    def _visit(self, call: WalkedCall) -> Outputs:
        inside = _layers_in(call.operation)
        for stage in self._stages(call, inside):
            stage()
        return functools.partial(_outputs, call.operation, self._values_in(call.operation))

    def _values_in(self, operation: Any) -> list[tuple[Any, Any]]:
        """Returns the new values, as (variable, tensor), of the variables of an operation."""
        own = [id(variable) for variable in getattr(operation, "variables", ())]
        return [self._values[key] for key in own if key in self._values]

    def _stages(self, call: WalkedCall, inside: Sequence[Any]) -> list[Callable[[], None]]:
        """Returns what is to be done in a call, in the order in which its layers are called."""
        of_layer: dict[int, list[int]] = {}
        for index, target in enumerate(self.targets):
            of_layer.setdefault(id(target.layer), []).append(index)
        wanted = [layer for layer in inside if id(layer) not in self._done]
        wanted = [layer for layer in wanted if id(layer) in of_layer or self._follows_statistics(layer)]
        stages: list[Callable[[], None]] = []
        if not wanted:
            return stages
        # Half of the memory is left for what lies between the calls.
        inputs = InnerInputs(call, wanted, self._memory / 2)
        for layer, _ in inputs.order:
            # A layer that is called again elsewhere in the graph keeps the values found at its first call.
            self._done.add(id(layer))
            stages += [functools.partial(self._solve, call, index, inputs) for index in of_layer.get(id(layer), ())]
            if self._follows_statistics(layer):
                stages.append(functools.partial(self._move_statistics, call, layer, inputs))
        return stages

    def _follows_statistics(self, layer: Any) -> bool:
        return self._solver.repairs and isinstance(layer, keras.layers.BatchNormalization)

    # One weight -------------------------------------------------------------------------------------------------------

    def _solve(self, call: WalkedCall, index: int, inputs: InnerInputs) -> None:
        target, product = self.targets[index], self._products[index]
        weight = self._get(target.variable)
        moments = LayerMoments(product, product.matrix(weight.astype("float32")))
        values = self._values_in(call.operation)
        for batch in range(len(call.arguments)):
            for arguments in inputs.of(target.layer, batch, values):
                moments.observe(arguments.before, None if arguments.same else arguments.after)
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

    # Batch normalization ----------------------------------------------------------------------------------------------

    def _move_statistics(self, call: WalkedCall, layer: Any, inputs: InnerInputs) -> None:
        """Lets the moving statistics of a batch normalization follow its inputs."""
        before, after, same = ChannelStatistics(layer), ChannelStatistics(layer), True
        values = self._values_in(call.operation)
        for batch in range(len(call.arguments)):
            for arguments in inputs.of(layer, batch, values):
                same = same and arguments.same
                before.observe(arguments.before[0])
                after.observe(arguments.after[0])
        if same:
            return
        for variable, value in followed(layer, before, after, self._get):
            self._set(variable, value)


def _outputs(operation: Any, values: Sequence[tuple[Any, Any]], arguments: Pair) -> Pair:
    """Returns the outputs of a call before and after some of its variables have new values."""
    before = run(operation, arguments.before)
    if arguments.same and not values:
        return Pair(before, before)
    with keras.StatelessScope(state_mapping=values):
        return Pair(before, run(operation, arguments.after))


def _layers_in(operation: Any) -> list[Any]:
    """Returns the layers whose calls can be observed in a call of the operation; [] for an operation without layers."""
    if not isinstance(operation, keras.layers.Layer):
        return []
    return [one for one in operation._flatten_layers() if not isinstance(one, keras.layers.RNN)]
