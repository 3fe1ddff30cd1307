"""Trains a model as its integer file will compute (quantization-aware training)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime import backend, jax_state, patching
from prunekit.core.runtime.optimizers import optimizers_for
from prunekit.core.runtime.snapshot import Snapshot, arrays_under, lacking
from prunekit.core.runtime.variable_values import assigned
from prunekit.core.training.joined_variables import joined, trainer_for
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import PER_TENSOR, Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions, price_of_bits
from prunekit.techniques.quantize.placement.rules import fixed_grid
from prunekit.techniques.quantize.placement.units import SharedGrid
from prunekit.techniques.quantize.preparation import Preparation
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.techniques.quantize.rounding.simulation import simulated_calls
from prunekit.techniques.quantize.training.code_lengths import BitPrice
from prunekit.techniques.quantize.training.learned_ranges import LearnedRanges

_KINDS = {"begun": bool, "frozen": bool}


def learning_rate(name: str, value: Any) -> float:
    """Returns a learning rate of ranges.

    Raises:
        ValueError: It is not a number above 0 and below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"`{name}` is a number above 0 and below 1, such as 1e-3. Received: {value!r}.")
    return float(value)


@dataclass(frozen=True, eq=False)
class TracedRanges:
    """What a trace of a step on integers contains beside the model.

    Attributes:
        options: From which codes and placement follow.
        rate: Price of a bit.
        ranges: The ranges that the trace was made with.
        variables: Their variables then.
    """

    options: QuantizationOptions
    rate: float
    ranges: LearnedRanges
    variables: tuple[Any, ...]

    def are_of(self, ranges: LearnedRanges) -> bool:
        """Returns True if the variables belong to these ranges."""
        present = ranges.variables
        same = len(present) == len(self.variables)
        return same and all(one is two for one, two in zip(present, self.variables, strict=True))


class QuantizationTraining(Preparation):
    """Trains weights and ranges so that the model keeps its quality on integers.

    In a training step, weights and tensors are rounded as the integer file rounds them; gradients pass the rounding as
    if it were the identity, inside the range. The weights that are updated are not rounded: an update smaller than a
    step is not lost. They are put on their grids at the end.

    Args:
        model: A built model.
        options: What becomes integers; its method and what is done before rounding are not used.
        data: Calibration data, from which the ranges at the start are chosen.
        optimizer: The optimizer, or list of optimizers, of the loop; None for those of the model.
        range_learning_rate: Learning rate of the ranges: about the largest relative change of a scale in one update.
        rate: Price of a bit: the loss contains it times the mean bits of a weight that is entropy-coded.

    Attributes:
        frozen: True once batch normalizations compute with their moving statistics.

    Raises:
        TypeError, ValueError: As for `pk.quantize`.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3 (training with simulated quantization).
    """

    def __init__(
        self,
        model: Any,
        options: QuantizationOptions,
        data: Any,
        *,
        optimizer: Any = None,
        range_learning_rate: float = 1e-3,
        rate: float = 0.0,
    ):
        super().__init__(model, options, data)
        self._optimizer, self._rate = optimizer, price_of_bits(rate)
        self._learning_rate = learning_rate("range_learning_rate", range_learning_rate)
        self._ranges: LearnedRanges | None = None
        self.frozen = False
        if not self.weights and not self.placement.ranges:
            raise ValueError(f"The model {model.name!r} has no weight and no tensor that integers can represent.")

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose updates train the weights."""
        return optimizers_for(self.model, self._optimizer)

    kind = "quantization"
    variants = ("integers", "integers, frozen")

    @property
    def variant(self) -> str:
        """Name of what a trace of a training step contains now."""
        return self.variants[self.frozen]

    @property
    def begun(self) -> bool:
        """True once ranges are known, so that the model is trained on integers."""
        return self._ranges is not None

    def begin(self) -> None:
        """Chooses the ranges at the start from the calibration data and the present weights.

        Raises:
            ValueError: A weight or a tensor is not finite.
        """
        jax_state.sync_model_state(self.model)
        self.check_scale()
        ranges = self.calibrated_ranges()
        self._train(ranges, [self.grid_of(weight) for weight in self.weights])

    def _train(self, ranges: dict[SharedGrid, Grid], weights: Sequence[Grid]) -> None:
        of_weights = {id(weight.variable): grid for weight, grid in zip(self.weights, weights, strict=True)}
        make = functools.partial(keras.optimizers.Adam, learning_rate=self._learning_rate)
        with backend.variable_scope(self.model):
            self._ranges = LearnedRanges(self.formats, ranges, of_weights)
            self._ranges.trainer = trainer_for(self.optimizers, self._ranges.variables, make)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside the scope, the model computes on integers, and training steps train weights and ranges."""
        ranges = self._known()
        with (
            simulated_calls(self.placement, ranges.for_pass, frozen=self.frozen),
            joined(self.model, self.optimizers, ranges.variables, ranges.trainer),
            self._priced(ranges),
        ):
            yield

    @contextlib.contextmanager
    def _priced(self, ranges: LearnedRanges) -> Iterator[None]:
        """Inside the scope, `model.losses` contains the price of the bits of all weights."""
        weights = self.weights if self._rate else []
        total = sum(int(np.prod(one.variable.shape)) for one in weights)
        with contextlib.ExitStack() as stack:
            for weight in weights:
                variable, form = weight.variable, IntegerFormat(self.bits[id(weight.variable)])
                price = self._rate * int(np.prod(variable.shape)) / total
                steps = functools.partial(ranges.steps, weight)
                priced = BitPrice(price, steps, form, variable.regularizer)
                stack.enter_context(patching.shadowed(variable, "_regularizer", priced))
            yield

    @contextlib.contextmanager
    def testing(self) -> Iterator[None]:
        """Inside the scope, the model computes on integers."""
        ranges = self._known()
        with simulated_calls(self.placement, ranges.for_pass), joined(self.model, (), ranges.variables, ranges.trainer):
            yield

    def in_traces(self) -> TracedRanges:
        """Returns what a trace of a step contains beside the model."""
        ranges = self._known()
        return TracedRanges(self.options, self._rate, ranges, tuple(ranges.variables))

    def take_over(self, traced: TracedRanges) -> bool:
        """Trains the variables that a former trace contains, from the present values; False if it does not fit.

        The trace must contain the same model, with the same layers and optimizers. A training that used the variables
        before goes on with others, of the same values.
        """
        ranges = self._known()
        if (traced.options, traced.rate) != (self.options, self._rate):
            return False
        if not traced.are_of(ranges) and traced.are_of(traced.ranges):
            ranges.exchange_variables(traced.ranges)
        return traced.are_of(ranges)

    def _known(self) -> LearnedRanges:
        if self._ranges is None:
            raise RuntimeError("`begin` comes before the first training step.")
        return self._ranges

    def finish(self, notes: Sequence[str] = ()) -> QuantizationState:
        """Puts the weights on their grids, in place, and returns the quantized model.

        Args:
            notes: Remarks for the report.

        Raises:
            ValueError: A weight is NaN or infinite; nothing is changed.
        """
        jax_state.sync_model_state(self.model)
        if not self.begun:
            # As after training: ranges of what the rounded weights compute.
            self.check_scale()
            rounded = self.nearest(self.weights)
            with assigned(rounded.values):
                return self.result(rounded, self.calibrated_ranges(), "nearest", tuple(notes))
        wrong = [one.name for one in self.weights if not np.isfinite(array_of(one.variable).astype("float32")).all()]
        if wrong:
            raise ValueError(
                "At the end of a training on integers the weights are put on grids, and must be finite. Received: NaN "
                f"or infinite values in {', '.join(wrong[:5])}. Lower the learning rate, and check data and loss."
            )
        ranges, weights = self._known().grids()
        rounded = self.nearest(self.weights, weights)
        with assigned(rounded.values):
            return self.result(rounded, ranges, "training", tuple(notes))

    # ---- what an interrupted training goes on from -------------------------------------------------------------------

    def values(self) -> list[np.ndarray]:
        """Returns the trained ranges, as `assign` takes them."""
        return [] if self._ranges is None else [np.array(array_of(one)) for one in self._ranges.variables]

    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Sets the trained ranges."""
        for variable, value in zip(self._known().variables, values, strict=True):
            variable.assign(value)

    def snapshot(self) -> Snapshot:
        """Returns everything besides weights and optimizer that `restore` continues from."""
        arrays: dict[str, np.ndarray] = {}
        if self._ranges is not None:
            for index, grid in enumerate(self._ranges.starts):
                arrays[f"scale/{index}"], arrays[f"zero_point/{index}"] = grid.scale, grid.zero_point
                arrays[f"bits/{index}"] = np.array(grid.format.bits)
            arrays |= {f"change/{i}": value for i, value in enumerate(self.values())}
            arrays |= {f"trainer/{i}": np.array(array_of(one)) for i, one in enumerate(self._ranges.trainer.variables)}
        return Snapshot({"begun": self.begun, "frozen": self.frozen}, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state, instead of `begin`; weights and optimizer must already be restored.

        Raises:
            ValueError: The state is of another model or of other options, or incomplete.
        """
        wrong = lacking(snapshot.values, _KINDS)
        if wrong is not None:
            raise ValueError(f"The saved state of a quantization lacks {wrong}, or another version wrote it.")
        if snapshot.values["begun"]:
            self._train(*self._saved_grids(snapshot))
            known = self._known()
            self.assign(_numbered(snapshot.arrays, "change", len(known.variables)))
            saved = _numbered(snapshot.arrays, "trainer", len(known.trainer.variables))
            for variable, value in zip(known.trainer.variables, saved, strict=True):
                variable.assign(value)
        self.frozen = snapshot.values["frozen"]

    def _saved_grids(self, snapshot: Snapshot) -> tuple[dict[SharedGrid, Grid], list[Grid]]:
        form, places = self.formats.activations, self.placement.ranges
        kinds: list[tuple[IntegerFormat, Granularity, tuple[int, ...]]] = []
        if form is not None:
            kinds = [(place.codes(form), PER_TENSOR, ()) for place in places if place.signed is None]
        for one in self.weights:
            shape = one.granularity.parameter_shape(tuple(one.variable.shape))
            kinds.append((IntegerFormat(self.bits[id(one.variable)]), one.granularity, shape))
        arrays = snapshot.arrays
        # Shapes alone do not tell weights of 8 bits from those of 4.
        found = {name: one.shape for name, one in arrays_under(arrays, "scale/").items()}
        bits = {name: int(one) for name, one in arrays_under(arrays, "bits/").items()}
        expected = {str(index): kind for index, kind in enumerate(kinds)}
        if (found, bits) != (
            {name: shape for name, (_, _, shape) in expected.items()},
            {name: kind.bits for name, (kind, _, _) in expected.items()},
        ):
            raise ValueError(
                "A resumed training must quantize the same tensors and weights as before. Received: the state of "
                "another quantization. Use the model and the options of the first run, or begin in another folder."
            )
        scales, zeros = (_numbered(arrays, name, len(kinds)) for name in ("scale", "zero_point"))
        saved = zip(kinds, scales, zeros, strict=True)
        grids = iter([Grid(kind, one, scale, zero) for (kind, one, _), scale, zero in saved])
        ranges: dict[SharedGrid, Grid] = {}
        if form is not None:
            ranges = {one: next(grids) if one.signed is None else fixed_grid(one.signed, form) for one in places}
        return ranges, list(grids)


def _numbered(arrays: Mapping[str, np.ndarray], name: str, count: int) -> list[np.ndarray]:
    """Returns the arrays "NAME/0", "NAME/1" and so on; files may have them in another order.

    Raises:
        ValueError: One is missing.
    """
    names = [f"{name}/{index}" for index in range(count)]
    missing = next((one for one in names if one not in arrays), None)
    if missing is not None:
        raise ValueError(f"The saved state of a quantization lacks {missing!r}, or another version wrote it.")
    return [np.array(arrays[one]) for one in names]
