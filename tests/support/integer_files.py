"""Runs integer files tensor by tensor beside their simulation."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import keras
import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from keras import ops

from prunekit.delivery.litert import input_specs
from prunekit.techniques.quantize.calibration import GridRounding
from prunekit.techniques.quantize.simulation import simulating


@dataclass(frozen=True)
class Difference:
    """Codes of one tensor in a file against those of the simulation on the file's own inputs of the layer.

    Attributes:
        name: Name of the range.
        largest: Largest difference, in steps.
        share: Share of the codes that differ.
    """

    name: str
    largest: int
    share: float


class Following(GridRounding):
    """Rounds as the simulation, and then continues with what the file computed, so that differences do not add up."""

    def __init__(self, formats, grids, codes):
        super().__init__(formats, grids)
        self._codes = list(codes)
        self.differences = []

    def tensor(self, value, place):
        grid, theirs = self._codes[len(self.differences)]
        result = super().tensor(value, place)
        if theirs is None:
            self.differences.append(Difference(place.name, 0, 0.0))
            return result
        mine = grid.codes(ops.convert_to_numpy(result))
        theirs = nearest_layout(theirs, mine)
        apart = np.abs(mine - theirs)
        self.differences.append(Difference(place.name, int(apart.max()), float((apart > 0).mean())))
        return ops.convert_to_tensor(grid.values(theirs))


def nearest_layout(theirs: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Returns an array in the layout of another one: the converter rounds before or after it moves axes."""
    if theirs.size != mine.size:
        raise ValueError(f"Tensors of one rounding have one size. Received: {theirs.shape} and {mine.shape}.")
    if theirs.ndim != mine.ndim or theirs.shape == mine.shape:
        return theirs.reshape(mine.shape)
    orders = [axes for axes in itertools.permutations(range(mine.ndim)) if theirs.transpose(axes).shape == mine.shape]
    found = [theirs.transpose(axes) for axes in orders] or [theirs.reshape(mine.shape)]
    return min(found, key=lambda one: np.abs(one - mine).sum())


def run(made, model, inputs) -> tuple[Interpreter, list[np.ndarray]]:
    """Returns the interpreter after it ran a file, and the outputs in the model's order.

    Args:
        made: An `IntegerFile`.
        model: Its model.
        inputs: Examples in the model's input structure.
    """
    interpreter = Interpreter(
        model_content=made.content,
        # The reference kernels keep every tensor.
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=True,
    )
    flat = [np.asarray(one) for one in keras.tree.flatten(inputs)]
    given = {spec.name: one for spec, one in zip(input_specs(model, inputs), flat, strict=True)}
    outputs = interpreter.get_signature_runner()(**given)
    names = [re.sub(r"\W", "_", name) for name in getattr(model, "output_names", [])]
    return interpreter, [outputs[name] for name in (names if len(outputs) > 1 else outputs)]


def differences(made, placement, formats, grids, sample) -> list[Difference]:
    """Returns the difference of every rounded tensor.

    Args:
        made: An `IntegerFile`.
        placement: Where tensors are rounded.
        formats: The codes.
        grids: The grid of each range.
        sample: One example in the model's input structure.
    """
    model = placement.graphs.main.model
    interpreter, _ = run(made, model, sample)
    codes = [
        (grid, None if index is None else interpreter.get_tensor(index).astype("int32"))
        for grid, index in made.roundings
    ]
    following = Following(formats, grids, codes)
    with simulating(placement, following):
        model(keras.tree.map_structure(ops.convert_to_tensor, sample), training=False)
    assert len(following.differences) == len(codes)
    return following.differences
