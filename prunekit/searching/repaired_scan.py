"""Measures a model with some weights changed, and the layers that read the change fitted to their former outputs.

A removal or a rounding after training is always followed by such a fit, which makes up for most of the change: without
it, errors of layers do not tell which of them matter. Only the next layers are fitted, since the layers after them see
little of what is left.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.core.data.moving_statistics import ChannelStatistics, followed
from prunekit.core.layerwise.calibration_walk import Pair, WalkedCall
from prunekit.core.layerwise.inner_inputs import InnerInputs
from prunekit.core.outputs.graph_steps import ForwardPass, GraphStep, Key, steps_of
from prunekit.core.outputs.output_error import output_error
from prunekit.core.outputs.suffix_runs import SuffixRuns
from prunekit.core.runtime import backend
from prunekit.core.runtime.variable_values import replaced
from prunekit.core.statistics.layer_inputs import LayerMoments, RowSample
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.reconstruction import DAMPING

# Rows for each input of a layer that is fitted to a sample of its rows: more make its error a seventh smaller at most.
_ROWS = 8

# New values of variables, each variable once.
Values = Sequence[tuple[Any, np.ndarray]]


@dataclass(frozen=True, eq=False)
class _Action:
    """What is done with a call that reads a change.

    Attributes:
        index: Number of the call.
        product: The product that is fitted; None if none is.
        moves: Whether its moving statistics follow its inputs.
    """

    index: int
    product: LayerProduct | None
    moves: bool


class RepairedScan:
    """Walks through a model, call by call, and measures what changes of the weights ahead do to its outputs.

    Args:
        model: A built Keras model with a graph of layers.
        fitted: Batches of inputs to which layers are fitted.
        measured: Batches of inputs on which outputs are compared; others than `fitted`, since a layer of many inputs
            can be fitted to any few examples.
        products: The products of the weights that may be fitted.
        memory: Largest number of bytes of activations that are kept, of `measured`, and of what the calls ahead compute
            for `fitted`: where a repair needs more for all batches, it is fitted to fewer of them, to one at least.
        activation_bytes: Bytes of the outputs of each call for one example.

    Raises:
        ValueError: An output is not finite.

    Attributes:
        steps: The calls.
        at: The number of the next call.
    """

    def __init__(
        self,
        model: Any,
        fitted: Sequence[Any],
        measured: Sequence[Any],
        products: Sequence[LayerProduct],
        memory: float,
        activation_bytes: Sequence[int],
    ):
        self._pass: ForwardPass = steps_of(model, fitted[0])
        self.steps: Sequence[GraphStep] = self._pass.steps
        self.at = 0
        self._first = self._pass.first_readers()
        self._products = {id(product.target.layer): product for product in products}
        self._runs = SuffixRuns(model, measured, list(model.variables), memory)
        self._outputs = self._measured()
        if not all(np.isfinite(one).all() for one in self._outputs):
            raise ValueError(
                f"A search compares outputs. Received: the model {model.name!r}, whose outputs are not all finite on "
                "these examples. Look for nan and infinity in weights and inputs, and for masks of minus infinity."
            )
        flat = (self._pass.flat_inputs(batch) for batch in fitted)
        self._values = [dict(zip(self._pass.inputs, tensors, strict=True)) for tensors in flat]
        self._memory = memory
        self._bytes = [size * len(keras.tree.flatten(fitted[0])[0]) for size in activation_bytes]
        self._look_back()

    def _look_back(self) -> None:
        """Forgets what calls ahead compute, which is kept for all changes that are measured before the next call."""
        self._ahead, self._ahead_to = [dict(values) for values in self._values], [self.at] * len(self._values)

    def advance(self) -> None:
        """Passes the next call."""
        step = self.steps[self.at]
        live = set(self._pass.live_before(self.at + 1)) if self.at + 1 < len(self.steps) else set()
        for values in self._values:
            step.compute(values)
            for key in [key for key in values if key not in live]:
                del values[key]
        self.at += 1
        self._look_back()

    def start_of(self, values: Values) -> int | None:
        """Returns the number of the first call that reads one of the variables; None if none does."""
        found = [self._first[id(variable)] for variable, _ in values if id(variable) in self._first]
        return min(found, default=None)

    def moments(self, product: LayerProduct) -> LayerMoments:
        """Returns the moments of the layer of the next call, or of one inside it."""
        found = LayerMoments(product, product.matrix(array_of(product.target.variable).astype("float32")))
        for arguments in self._inputs_of(product.target.layer):
            found.observe(arguments, None)
        found.finish()
        return found

    def _inputs_of(self, layer: Any) -> Iterator[tuple]:
        """Yields the arguments of each call of a layer in the next call."""
        step = self.steps[self.at]
        if step.layer is layer:
            yield from (_arguments(step, values) for values in self._values)
            return
        given = [step.arguments([values[key] for key in step.reads]) for values in self._values]  # type: ignore[misc]
        call = WalkedCall(step.layer, [Pair(one, one) for one in given])
        inner = InnerInputs(call, [layer], math.inf)
        for batch in range(len(given)):
            yield from (pair.before for pair in inner.of(layer, batch, ()))

    def error(self, values: Values, masks: Mapping[int, np.ndarray] | None = None) -> float:
        """Returns the squared error of the outputs, `output_error`, with new values, of calls from the next one on.

        The variables have their former values at the end.

        Args:
            values: The new values.
            masks: id of a variable -> what of it is fitted, for weights that read a change and are changed themselves.
        """
        masks = masks or {}
        plan = self._plan({id(variable) for variable, _ in values}, masks)
        before = self._before(plan)
        with contextlib.ExitStack() as undo:
            undo.enter_context(replaced(values))
            self._repair(plan, before, masks, undo)
            self._runs.advance(self._runs.position(self._earliest(values)) or 0)
            return output_error(self._outputs, self._measured()) ** 2

    def _earliest(self, values: Values) -> Any:
        known = [variable for variable, _ in values if id(variable) in self._first]
        return min(known, key=lambda variable: self._first[id(variable)])

    def _measured(self) -> list[np.ndarray]:
        batches = [
            [array_of(leaf).astype("float32") for leaf in keras.tree.flatten(outputs)]
            for outputs in self._runs.outputs()
        ]
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    # The repair -------------------------------------------------------------------------------------------------------

    def _plan(self, changed: set[int], masks: Mapping[int, np.ndarray]) -> list[_Action]:
        """Returns what is done with the calls that read a change, in their order, until nothing reads one.

        Args:
            changed: ids of the variables that have new values.
            masks: As for `error`.
        """
        keys: set[Key] = set()
        plan = []
        for index in range(self.at, len(self.steps)):
            step = self.steps[index]
            own = any(id(variable) in changed for variable in step.variables)
            reads = any(key in keys for key in step.reads)
            if not (own or reads):
                continue
            product = self._products.get(id(step.layer)) if reads else None
            kernel = None if product is None else id(product.target.variable)
            fits = kernel is not None and (kernel not in changed or kernel in masks)
            moves = reads and isinstance(step.layer, keras.layers.BatchNormalization)
            plan.append(_Action(index, product if fits else None, moves))
            # What a layer lacks after its fit is small: the layers behind it are not fitted to it.
            if not fits or kernel in changed:
                keys.update(step.writes)
        last = max((one.index for one in plan if one.product is not None), default=-1)
        return [one for one in plan if one.index <= last]

    def _repair(
        self,
        plan: Sequence[_Action],
        before: Sequence[dict[Key, Any]],
        masks: Mapping[int, np.ndarray],
        undo: contextlib.ExitStack,
    ) -> None:
        changed: list[dict[Key, Any]] = [{} for _ in before]
        for action in plan:
            step = self.steps[action.index]
            if action.product is not None:
                mask = masks.get(id(action.product.target.variable))
                self._fit(step, action.product, before, changed, mask, undo)
                if mask is None:
                    continue
            elif action.moves:
                _move_statistics(step, before, changed, undo)
            for was, now in zip(before, changed, strict=True):
                found = step.run([now.get(key, was.get(key)) for key in step.reads])
                now.update(zip(step.writes, found, strict=True))

    def _before(self, plan: Sequence[_Action]) -> list[dict[Key, Any]]:
        """Returns what the calls of a plan read with the present values of the variables, for each batch that is read.

        As many batches as memory allows, beside what they will compute with the change.
        """
        end = max((action.index + 1 for action in plan), default=self.at)
        needed = sum(self._bytes[self.at : end]) + sum(self._bytes[action.index] for action in plan)
        count = max(1, min(len(self._ahead), int(self._memory // max(needed, 1))))
        for number in range(count):
            for step in self.steps[self._ahead_to[number] : end]:
                step.compute(self._ahead[number])
            self._ahead_to[number] = max(self._ahead_to[number], end)
        return self._ahead[:count]

    def _fit(
        self,
        step: GraphStep,
        product: LayerProduct,
        before: Sequence[dict[Key, Any]],
        changed: Sequence[dict[Key, Any]],
        mask: np.ndarray | None,
        undo: contextlib.ExitStack,
    ) -> None:
        wanted = -(-_ROWS * product.inputs // len(before))
        was, now = [], []
        for one, other in zip(before, changed, strict=True):
            sample = RowSample(wanted)
            was.append(_rows(product, _arguments(step, one), sample))
            now.append(_rows(product, _arguments(step, one | other), sample))
        variable = product.target.variable
        matrix = product.matrix(array_of(variable).astype("float64"))
        x, y = np.concatenate(now, axis=1), np.concatenate(was, axis=1) @ matrix
        corrects = product.bias(y.mean(axis=1)) is not None
        found, shift = ridge(x, y, matrix, centred=corrects)
        kernel = product.kernel(found)
        bias = product.bias(shift) if corrects else None
        if mask is not None:
            kernel = np.where(mask, kernel, 0.0)
            if bias is not None:
                alive = product.matrix(mask).any(axis=1)
                bias = np.where(product.bias(alive.astype("float64")) > 0, bias, 0.0)  # type: ignore[operator]
        undo.enter_context(replaced([(variable, kernel)]))
        if bias is not None:
            layer = product.target.layer
            undo.enter_context(replaced([(layer.bias, array_of(layer.bias) + bias)]))


def ridge(x: np.ndarray, y: np.ndarray, matrix: np.ndarray, *, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrices near given ones whose products with rows are nearest to wanted outputs, and mean errors.

    Args:
        x: Rows, shape (groups, rows, inputs).
        y: Wanted outputs, shape (groups, rows, outputs).
        matrix: Shape (groups, inputs, outputs); directions of which the rows say little keep these values.
        centred: True: a bias takes over the means; what it must add is returned, else zeros.

    Returns:
        Matrices, and shifts of shape (groups, outputs).
    """
    x_mean = x.mean(axis=1, keepdims=True) if centred else np.zeros((len(x), 1, x.shape[2]))
    left = y - x @ matrix
    left_mean = left.mean(axis=1, keepdims=True) if centred else np.zeros((len(x), 1, y.shape[2]))
    x, left = x - x_mean, left - left_mean
    added = DAMPING * np.square(x).sum(axis=(1, 2)) / x.shape[2]
    added = np.where(added > 0, added, 1.0)[:, None, None]
    turned = np.swapaxes(x, 1, 2)
    if x.shape[1] < x.shape[2]:
        change = turned @ np.linalg.solve(x @ turned + added * np.eye(x.shape[1]), left)
    else:
        change = np.linalg.solve(turned @ x + added * np.eye(x.shape[2]), turned @ left)
    shift = (left_mean - x_mean @ change)[:, 0] if centred else np.zeros((len(x), y.shape[2]))
    return matrix + change, shift


def _rows(product: LayerProduct, args: tuple, sample: RowSample) -> np.ndarray:
    return array_of(backend.on_host(product.rows(args, sample))).astype("float64")


def _arguments(step: GraphStep, values: Mapping[Key, Any]) -> tuple:
    args, kwargs = step.arguments([values[key] for key in step.reads])  # type: ignore[misc]
    return args or tuple(kwargs.values())


def _move_statistics(
    step: GraphStep, before: Sequence[dict[Key, Any]], changed: Sequence[dict[Key, Any]], undo: contextlib.ExitStack
) -> None:
    """Lets the moving statistics of a batch normalization follow its inputs."""
    layer = step.layer
    was, now = ChannelStatistics(layer), ChannelStatistics(layer)
    for one, other in zip(before, changed, strict=True):
        was.observe(_arguments(step, one)[0])
        now.observe(_arguments(step, one | other)[0])
    undo.enter_context(replaced(followed(layer, was, now, array_of)))
