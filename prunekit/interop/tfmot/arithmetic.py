"""The rules of tensorflow-model-optimization for schedules, counts and patterns, reproduced to the bit.

If its compiled training step and its eager calls differ in the last bit of a float32, this module follows the compiled
step, which `model.fit` runs.
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
    """A schedule as tensorflow-model-optimization applies it: steps are forward passes in training, from 1 on.

    Masks change only at begin_step, begin_step + frequency, ... up to `end_step`: the final sparsity is not reached if
    `frequency` does not divide the length, and an update at step 0 never takes place. Values are float32.

    Args:
        inner: A `PolynomialDecay` or a `ConstantSparsity`. A `OneShot` means a constant sparsity with one update.
        once: True makes one update, at step 1 (or at a `OneShot`'s step), as the original does for m-by-n masks.

    Raises:
        ValueError: `inner` is another schedule, or a `PolynomialDecay` without length.

    Source: PruningSchedule, PolynomialDecay and ConstantSparsity of tensorflow-model-optimization 0.8.1.
    """

    inner: Schedule
    once: bool = False

    def __post_init__(self) -> None:
        if type(self.inner) not in (PolynomialDecay, ConstantSparsity, OneShot):
            raise ValueError(
                "tensorflow-model-optimization has two schedules: pass a PolynomialDecay or a ConstantSparsity, or "
                'leave policy="tfmot" out, which does not support custom schedule classes. '
                f"Received: {self.inner!r}."
            )
        if self.inner.is_open:
            raise ValueError(
                "tensorflow-model-optimization does not know the length of a training. Received: "
                f"{self.inner!r}. Pass end_step, and frequency=100, its default."
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
        # The first forward pass is step 1.
        return self.inner.begin_step or self.inner.frequency

    @property
    def frequency(self) -> int:
        """Steps from one update to the next."""
        return self.inner.frequency

    @property
    def last_update(self) -> int | None:
        """The last update step; `begin_step` if there is no update; None if updates never end."""
        if self.once or isinstance(self.inner, OneShot):
            return self.begin_step
        end = self.inner.last_update
        return None if end is None else max(self.begin_step, end - (end - self.inner.begin_step) % self.frequency)

    @property
    def final_step(self) -> int:
        """The last update step of a decay; the first update step of a constant sparsity."""
        last = self.last_update
        return self.begin_step if last is None or not isinstance(self.inner, PolynomialDecay) else last

    @property
    def final_sparsity(self) -> float:
        """The sparsity at `final_step`."""
        return self._sparsity(self.final_step)

    def latest_update(self, step: int) -> int | None:
        """Returns the largest update step that is not after `step`, or None before the first."""
        return None if self._never else super().latest_update(step)

    def update_steps(self, steps: int) -> list[int]:
        """Returns every update step of a training of `steps` forward passes."""
        return [] if self._never else super().update_steps(steps)

    @property
    def _never(self) -> bool:
        """True if there is no update step: the only update step would have been 0."""
        end = self.inner.last_update
        return not self.once and end is not None and self.begin_step > end

    def __call__(self, step: int) -> float:
        """Returns 1 - density at `step` as an exact float64, from which `kept_count` recovers the float32 density."""
        return self._sparsity(step)

    def _sparsity(self, step: int) -> float:
        return 1.0 - float(self._density(step))

    def _density(self, step: int) -> np.float32:
        """Returns 1 - sparsity, rounded at the operations of TensorFlow's optimised graph.

        The graph optimiser replaces a division by a product with the reciprocal, folds 1 - final into one constant, and
        writes the third power as two products; the factor before the power is part of the first product.
        """
        if not isinstance(self.inner, PolynomialDecay):
            return _ONE - np.float32(self.inner.final_sparsity)
        decay = self.inner
        progress = np.float32(step - decay.begin_step) * (_ONE / np.float32(decay.last_update - decay.begin_step))
        rest = _ONE - min(_ONE, max(np.float32(0), progress))
        factor = np.float32(decay.initial_sparsity - decay.final_sparsity)
        lost = (factor * rest) * (rest * rest) if decay.power == 3 else factor * _power(rest, decay.power)
        return (_ONE - np.float32(decay.final_sparsity)) - lost


def _power(base: np.float32, exponent: float) -> np.float32:
    # NumPy's float32 power can differ in the last bit from the C library's, which TensorFlow calls for a scalar.
    return np.float32(ops.convert_to_numpy(ops.power(ops.convert_to_tensor(base), float(exponent))))


def kept_count(sparsity: float, n: int) -> int:
    """Returns max(round(n (1 - sparsity)), 1) in float32, halves to even: how many of n entries set the threshold.

    Source: Pruning._update_mask of tensorflow-model-optimization 0.8.1.
    """
    return max(int(np.round(np.float32(n) * np.float32(1.0 - sparsity))), 1)


@dataclass(frozen=True)
class SamePoolingBlock(Block):
    """Blocks whose importance is pooled with SAME padding, as tensorflow-model-optimization does it.

    SAME padding puts half of the missing rows before the first row. So if the block does not divide the kernel, the
    pooled windows start up to half a block before the blocks that are then pruned.

    Source: pruning_utils.factorized_pool of tensorflow-model-optimization 0.8.1.
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises unless the shape has two axes with at least two blocks along each: the original fails otherwise."""
        blocks = (-(-shape[0] // self.inputs), -(-shape[-1] // self.outputs))
        if len(shape) != 2 or min(blocks) < 2:
            raise ValueError(
                "tensorflow-model-optimization prunes blocks of kernels with 2 axes and at least 2 blocks along each, "
                f"and fails on others. Received: {self} for {name} of shape {tuple(shape)}. Leave this weight out "
                'with `exclude`, or leave policy="tfmot" out.'
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Returns the average or maximum of each window, shape (1, blocks of rows, blocks of columns)."""
        pool = _highest if self.pooling == "max" else _average
        down = pool(importance, self.inputs)
        return ops.transpose(pool(ops.transpose(down), self.outputs))[None]

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """Returns the number of blocks, including cut blocks."""
        return super().units(shape, (0,), (1,))

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """Returns the mask of all weights in kept blocks, with rows and columns in their stored order."""
        return super().expand(unit_mask, shape, (0,), (1,))


def _highest(matrix, length: int):
    """Returns the maximum of every window of `length` rows."""
    return ops.max(_windows(matrix, length, -math.inf), axis=1)


def _average(matrix, length: int):
    """Returns the mean of every window of `length` rows, without the padding."""
    rows, columns = matrix.shape
    if keras.backend.backend() == "tensorflow":
        # The same pooling kernel as the original, because its order of additions and divisions affects rounding.
        images, window = ops.reshape(matrix, (1, 1, rows, columns)), (1, length)
        return ops.average_pool(images, window, window, padding="same", data_format="channels_last")[0, 0]
    counts = ops.sum(_windows(ops.ones_like(matrix), length, 0.0), axis=1)
    return ops.sum(_windows(matrix, length, 0.0), axis=1) / counts


def _windows(matrix, length: int, padding: float):
    """Returns windows of shape (windows, length, columns) with SAME padding: half of it before the first row."""
    rows, columns = matrix.shape
    missing = -rows % length
    around = ((missing // 2, missing - missing // 2), (0, 0))
    return ops.reshape(ops.pad(matrix, around, constant_values=padding), (-1, length, columns))


@dataclass(frozen=True)
class TailedNM(NM):
    """N:M along the last axis but one, in every layer; an incomplete group at the end is padded with zeros.

    Source: pruning_utils.generate_m_by_n_mask of tensorflow-model-optimization 0.8.1, where (m, n) means m zeros in
        every n.
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises unless the shape has 2 or 4 axes."""
        if len(shape) not in (2, 4):
            raise ValueError(
                "tensorflow-model-optimization prunes m by n in kernels with 2 or 4 axes. Received: "
                f"{name} of shape {tuple(shape)}. Leave this weight out with `exclude`, or choose another pattern."
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Returns a mask, True for the n largest of every group; among equals the lower index is kept."""
        *before, inputs, outputs = importance.shape
        missing = -inputs % self.m
        padded = ops.pad(importance, [(0, 0)] * len(before) + [(0, missing), (0, 0)]) if missing else importance
        matrices = ops.reshape(padded, (-1, inputs + missing, outputs))
        spared = ops.equal(super().pool(matrices, (1,), (2,)), math.inf)
        return ops.reshape(spared[:, :inputs], importance.shape)
