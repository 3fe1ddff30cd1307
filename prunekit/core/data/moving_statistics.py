"""Moving statistics of batch normalizations: those of their inputs, and on inputs that stand in for data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.graph.watching import watching
from prunekit.core.data.batch_parts import in_parts
from prunekit.sparsity.array_ops import array_of

# Entries of which statistics are formed at once.
_AT_ONCE = 1 << 18
# Bytes of all outputs of the model on the inputs that are read.
_MEMORY = 1 << 28
# Rows of fewer have no statistics of their own.
_ROWS = 64
# Activations have drifted whose variances are so many times those of the training, or such a part of them: on less,
# what follows from synthetic inputs is as good with the statistics of the training, or better.
_DRIFT = 16.0
# Share of a moving variance that the variance of other inputs has at least: channels that are constant on them are
# not divided by nothing.
_LEAST = 1e-3


class ChannelStatistics:
    """Mean and variance of the inputs of a batch normalization, per channel.

    Args:
        layer: The batch normalization.

    Attributes:
        rows: Number of entries of each channel that were observed.
    """

    def __init__(self, layer: Any):
        self._axis, self.rows, self._sum, self._squares = layer.axis, 0, 0.0, 0.0

    def observe(self, inputs: Any) -> None:
        """Adds the inputs of one call."""
        channels = inputs.shape[self._axis]
        flat = np.moveaxis(array_of(ops.cast(inputs, "float32")), self._axis, -1).reshape(-1, channels)
        self.rows += len(flat)
        step = max(_AT_ONCE // channels, 1)
        for start in range(0, len(flat), step):
            wide = flat[start : start + step].astype("float64")
            self._sum = self._sum + wide.sum(axis=0)
            self._squares = self._squares + np.square(wide, out=wide).sum(axis=0)

    @property
    def mean(self) -> Any:
        return self._sum / self.rows

    @property
    def variance(self) -> Any:
        return np.maximum(self._squares / self.rows - np.square(self.mean), 0.0)


def followed(
    layer: Any, before: ChannelStatistics, after: ChannelStatistics, value_of: Callable[[Any], np.ndarray]
) -> list[tuple[Any, np.ndarray]]:
    """Returns the moving statistics of a batch normalization whose inputs changed, as (variable, value).

    The mean moves by the change of the mean, and the variance is multiplied by that of the variance.

    Args:
        layer: The batch normalization.
        before: Its inputs as they were.
        after: Its inputs as they are.
        value_of: Returns the value that a variable has.
    """
    known = before.variance > 0
    ratio = np.divide(after.variance, before.variance, out=np.ones_like(after.variance), where=known)
    mean, variance = layer.moving_mean, layer.moving_variance
    return [(mean, value_of(mean) + after.mean - before.mean), (variance, value_of(variance) * ratio)]


class Renormalization:
    """Lets a model's batch normalizations normalize synthetic inputs as they normalize data, where they would not.

    Moving statistics describe the training data. On synthetic inputs, activations can drift away from them, the more
    the deeper the model, until later layers read what they never read in training. Where they do (see `_DRIFT`), the
    moving statistics inside the scope are those of the inputs, one batch normalization after another, so that each
    gives outputs of the mean and the variance of the training, `beta` and `gamma ** 2`. At its end, also at that of a
    failure, the model has its own statistics again, moved as those inside the scope were.

    Args:
        model: A built model.
        inputs: Inputs of the model, in the structure that it takes; None changes nothing.

    Source: synthetic activations are to have the stored statistics: Cai et al. 2020, "ZeroQ", arXiv:2001.00281, eq. 2,
        which trains inputs to that end.
    """

    def __init__(self, model: Any, inputs: Any):
        self._model, self._inputs = model, inputs
        # id of a variable -> the variable, its value, its value on the inputs, and how it follows a change of the last.
        self._moved: dict[int, tuple[Any, np.ndarray, np.ndarray, Callable[..., np.ndarray]]] = {}

    def __enter__(self) -> Renormalization:
        layers = [one for one in self._model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)]
        if self._inputs is None or not layers:
            return self
        drifts: list[float] = []
        self._run(lambda layer, found: drifts.append(_drift(layer, found)))
        if max(drifts, default=0.0) > math.log(_DRIFT):
            try:
                self._run(self._renormalize)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for key, (variable, *_others) in self._moved.items():
            variable.assign(self.on_data(key, array_of(variable)))

    def on_data(self, key: int, value: Any) -> Any:
        """Returns the value outside the scope of a variable that has `value` inside: another one of moving statistics.

        Args:
            key: id of the variable.
            value: Value, as an array or a tensor.
        """
        if key not in self._moved:
            return value
        _, before, assumed, follow = self._moved[key]
        return follow(before, assumed, array_of(value))

    def _run(self, visit: Callable[[Any, ChannelStatistics], None]) -> None:
        """Runs the model, and shows each batch normalization at its first call, before it computes."""
        seen: set[int] = set()

        def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
            if isinstance(layer, keras.layers.BatchNormalization) and id(layer) not in seen:
                seen.add(id(layer))
                found = ChannelStatistics(layer)
                found.observe(args[0] if args else kwargs["inputs"])
                if found.rows >= _ROWS and np.isfinite(found.variance).all():
                    visit(layer, found)
            return original(layer, *args, **kwargs)

        with watching(see):
            self._model(in_parts(self._model, [self._inputs], _MEMORY, "all")[0], training=False)

    def _renormalize(self, layer: Any, found: ChannelStatistics) -> None:
        variance = np.maximum(found.variance, _LEAST * array_of(layer.moving_variance))
        for variable, value, follow in (
            (layer.moving_mean, found.mean, _shifted),
            (layer.moving_variance, variance, _scaled),
        ):
            before = np.array(array_of(variable))
            variable.assign(value.astype("float32"))
            self._moved[id(variable)] = variable, before, np.array(array_of(variable)), follow


def _drift(layer: Any, found: ChannelStatistics) -> float:
    """Returns the mean over the channels of |log(variance of the inputs / moving variance)|, up to a factor of 1000."""
    known = array_of(layer.moving_variance)
    ratios = np.divide(found.variance, known, out=np.ones_like(known, "float64"), where=known > 0)
    return float(np.abs(np.log(np.clip(ratios, _LEAST, 1 / _LEAST))).mean())


def _shifted(before: np.ndarray, assumed: np.ndarray, value: np.ndarray) -> np.ndarray:
    return before + (value - assumed)


def _scaled(before: np.ndarray, assumed: np.ndarray, value: np.ndarray) -> np.ndarray:
    return before * np.divide(value, assumed, out=np.ones_like(value), where=assumed > 0)
