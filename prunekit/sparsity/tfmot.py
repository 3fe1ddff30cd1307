"""The rules of tensorflow-model-optimization for schedules, counts and patterns, to the bit.

Where its compiled training step and its eager calls differ in the last bit of a float32, these follow the compiled one,
as `model.fit` runs it.
"""

import math
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from prunekit.sparsity.patterns import NM, Axes, Block
from prunekit.sparsity.schedules import ConstantSparsity, OneShot, PolynomialDecay, Schedule

_ONE = np.float32(1)


@dataclass(frozen=True)
class ForwardPassSchedule(Schedule):
    """A schedule as tensorflow-model-optimization follows it: steps are forward passes in training, from 1 on.

    Masks change at begin_step, begin_step + frequency, ... up to `end_step`, and nowhere else: the final sparsity is
    missed where `frequency` does not divide the length, and an update at step 0 never comes. Values are float32.

    Args:
        inner: A `PolynomialDecay` or a `ConstantSparsity`. A `OneShot` stands for a constant sparsity with one update.
        once: Whether there is one update, at step 1, whatever `inner` says: so it makes m-by-n masks.

    Raises:
        ValueError: Another schedule, or a `PolynomialDecay` without length.

    Source: PruningSchedule, PolynomialDecay and ConstantSparsity of tensorflow-model-optimization 0.8.1.
    """

    inner: Schedule
    once: bool = False

    def __post_init__(self) -> None:
        if type(self.inner) not in (PolynomialDecay, ConstantSparsity, OneShot):
            raise ValueError(
                "tensorflow-model-optimization has two schedules: pass a PolynomialDecay or a ConstantSparsity, or "
                'leave compat="tfmot" out, which does not follow classes of your own either. '
                f"Received: {self.inner!r}."
            )
        if isinstance(self.inner, PolynomialDecay) and self.inner.begin_step == self.inner.end_step:
            raise ValueError(
                "tensorflow-model-optimization divides by the length of a PolynomialDecay, and fails where it is 0. "
                f"Received: begin_step=end_step={self.inner.end_step}. Pass a ConstantSparsity."
            )

    @property
    def begin_step(self) -> int:
        """The first update step."""
        if isinstance(self.inner, OneShot):
            return self.inner.step
        if self.once:
            return 1
        # Its first pass is step 1.
        return self.inner.begin_step or self.inner.frequency

    @property
    def frequency(self) -> int:
        """Steps from one update to the next."""
        return self.inner.frequency

    @property
    def last_update(self) -> int | None:
        """The last update step; `begin_step` where there is none at all; None where updates go on for ever."""
        if self.once or isinstance(self.inner, OneShot):
            return self.begin_step
        end = self.inner.last_update
        return None if end is None else max(self.begin_step, end - (end - self.inner.begin_step) % self.frequency)

    @property
    def landing_step(self) -> int:
        """The last step at which a decay prunes, the first one at which a constant sparsity does."""
        last = self.last_update
        return self.begin_step if last is None or not isinstance(self.inner, PolynomialDecay) else last

    @property
    def final_sparsity(self) -> float:
        """The sparsity at `landing_step`."""
        return self._sparsity(self.landing_step)

    def latest_update(self, step: int) -> int | None:
        """The largest update step that is not after `step`, or None before the first."""
        return None if self._never else super().latest_update(step)

    def update_steps(self, steps: int) -> list[int]:
        """Every update step of a training of `steps` forward passes."""
        return [] if self._never else super().update_steps(steps)

    @property
    def _never(self) -> bool:
        """Whether the only update steps would have been at 0."""
        end = self.inner.last_update
        return not self.once and end is not None and self.begin_step > end

    def __call__(self, step: int) -> float:
        """1 - density of that step as a float64, exactly; `kept_count` gets the float32 density back from it."""
        return self._sparsity(step)

    def _sparsity(self, step: int) -> float:
        return 1.0 - float(self._density(step))

    def _density(self, step: int) -> np.float32:
        """1 - sparsity, rounded where TensorFlow rounds once it has rewritten the graph.

        Its optimiser divides by multiplying with the reciprocal, folds 1 - final into one constant, and writes the
        third power as two products, with the factor before it inside the first.
        """
        if not isinstance(self.inner, PolynomialDecay):
            return _ONE - np.float32(self.inner.final_sparsity)
        decay = self.inner
        progress = np.float32(step - decay.begin_step) * (_ONE / np.float32(decay.end_step - decay.begin_step))
        rest = _ONE - min(_ONE, max(np.float32(0), progress))
        factor = np.float32(decay.initial_sparsity - decay.final_sparsity)
        lost = (factor * rest) * (rest * rest) if decay.power == 3 else factor * _power(rest, decay.power)
        return (_ONE - np.float32(decay.final_sparsity)) - lost


def _power(base: np.float32, exponent: float) -> np.float32:
    # By the backend: NumPy's float32 power is a bit away from the C library's, which TensorFlow calls for a scalar.
    return np.float32(ops.convert_to_numpy(ops.power(ops.convert_to_tensor(base), float(exponent))))


def kept_count(sparsity: float, n: int) -> int:
    """max(round(n (1 - sparsity)), 1) in float32, halves to the even count: how many of n entries set the threshold.

    Source: Pruning._update_mask of tensorflow-model-optimization 0.8.1.
    """
    return max(int(np.round(np.float32(n) * np.float32(1.0 - sparsity))), 1)


@dataclass(frozen=True)
class SamePoolingBlock(Block):
    """Blocks whose importance is pooled with SAME padding, as tensorflow-model-optimization does it.

    SAME padding puts half of what is missing before the first row. So where the block does not divide the kernel, the
    windows that are pooled lie up to half a block before the blocks that are then pruned.

    Source: pruning_utils.factorized_pool of tensorflow-model-optimization 0.8.1.
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Needs two axes, and at least two blocks along each: the original fails on all others."""
        blocks = (-(-shape[0] // self.inputs), -(-shape[-1] // self.outputs))
        if len(shape) != 2 or min(blocks) < 2:
            raise ValueError(
                "tensorflow-model-optimization prunes blocks of kernels with 2 axes and at least 2 blocks along each, "
                f"and fails on others. Received: {self} for {name} of shape {tuple(shape)}. Leave this weight out "
                'with `exclude`, or leave compat="tfmot" out.'
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Average or maximum of each window, shape (1, blocks of rows, blocks of columns)."""
        pool = _highest if self.pooling == "max" else _average
        down = pool(importance, self.inputs)
        return ops.transpose(pool(ops.transpose(down), self.outputs))[None]

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of blocks, cut ones included."""
        return super().units(shape, (0,), (1,))

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """Every weight of a kept block, rows and columns as they are stored."""
        return super().expand(unit_mask, shape, (0,), (1,))


def _highest(matrix, length: int):
    """The maximum of every window of so many rows."""
    return ops.max(_windows(matrix, length, -math.inf), axis=1)


def _average(matrix, length: int):
    """The mean of every window of so many rows, without what pads it."""
    rows, columns = matrix.shape
    if keras.backend.backend() == "tensorflow":
        # The kernel that the original calls: it adds and divides in its own order.
        images, window = ops.reshape(matrix, (1, 1, rows, columns)), (1, length)
        return ops.average_pool(images, window, window, padding="same", data_format="channels_last")[0, 0]
    counts = ops.sum(_windows(ops.ones_like(matrix), length, 0.0), axis=1)
    return ops.sum(_windows(matrix, length, 0.0), axis=1) / counts


def _windows(matrix, length: int, padding: float):
    """Shape (windows, length, columns), padded as SAME does: half of what is missing before the first row."""
    rows, columns = matrix.shape
    missing = -rows % length
    around = ((missing // 2, missing - missing // 2), (0, 0))
    return ops.reshape(ops.pad(matrix, around, constant_values=padding), (-1, length, columns))


@dataclass(frozen=True)
class TailedNM(NM):
    """N:M along the last axis but one, whatever that means in the layer; a group cut off at the end counts as longer.

    Source: pruning_utils.generate_m_by_n_mask of tensorflow-model-optimization 0.8.1, where (m, n) means m zeros in
        every n.
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Needs 2 or 4 axes."""
        if len(shape) not in (2, 4):
            raise ValueError(
                "tensorflow-model-optimization prunes m by n in kernels with 2 or 4 axes. Received: "
                f"{name} of shape {tuple(shape)}. Leave this weight out with `exclude`, or choose another pattern."
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """True for the n largest of every group; among equals the lower index is kept."""
        *before, inputs, outputs = importance.shape
        missing = -inputs % self.m
        padded = ops.pad(importance, [(0, 0)] * len(before) + [(0, missing), (0, 0)]) if missing else importance
        matrices = ops.reshape(padded, (-1, inputs + missing, outputs))
        spared = ops.equal(super().pool(matrices, (1,), (2,)), math.inf)
        return ops.reshape(spared[:, :inputs], importance.shape)
