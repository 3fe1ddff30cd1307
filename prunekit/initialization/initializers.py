"""Initial weights: initializers of layers, and new ones for a built model that know its axes, its masks and its data.

    reinitialize(model, HeNormal(), masks=pruner.masks, seed=7)
    signal_report(model, x)

The variance-scaling family draws weights of standard deviation sqrt(scale / n). Given to a layer as
`kernel_initializer` they are Keras's own: n is guessed from the kernel's shape, and wrong for transposed, depthwise and
grouped convolutions and for embeddings. In `reinitialize` n comes from the axes that the table of layers knows, and
is counted over the weights that a mask keeps.
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.fans import fans
from prunekit.anatomy.tables import aligned
from prunekit.anatomy.targets import Skipped, Target, find_targets, near_misses, weights_in
from prunekit.initialization.lsuv import LSUV, Outputs, Scaled
from prunekit.initialization.sampling import deviation, draw
from prunekit.initialization.signal_report import LayerSignal, SignalReport, signal_report

__all__ = [
    "LSUV",
    "HeNormal",
    "LayerSignal",
    "LecunNormal",
    "Orthogonal",
    "Reinitialization",
    "Reinitialized",
    "SignalReport",
    "TruncatedNormal",
    "XavierNormal",
    "XavierUniform",
    "reinitialize",
    "signal_report",
]

_serialisable = keras.saving.register_keras_serializable(package="prunekit")


# ---------------------------------------------------------------- the initializers


@_serialisable
class TruncatedNormal(keras.initializers.TruncatedNormal):
    """Normal numbers, those further than 2 `stddev` from `mean` drawn again.

    `stddev` is that of the normal distribution before the cut, and is not corrected: what is drawn has a standard
    deviation of 0.8796 `stddev`. Masks do not change it.

    Args:
        stddev: Standard deviation before the cut, above 0.
        mean: Mean.
        seed: An integer, or a `keras.random.SeedGenerator`; None draws one.

    Raises:
        ValueError: `stddev` is not a positive finite number.

    Source: keras.initializers.TruncatedNormal, tf.random.truncated_normal; the factor is
    sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)), phi and Phi the density and distribution function of the standard normal.
    """

    def __init__(self, stddev: float, mean: float = 0.0, seed: Any = None):
        if not 0 < stddev < math.inf:
            raise ValueError(f"A standard deviation is a finite number above 0. Received: stddev={stddev}.")
        super().__init__(mean=mean, stddev=stddev, seed=seed)


@_serialisable
class XavierUniform(keras.initializers.GlorotUniform):
    """Uniform in [-limit, limit], limit = sqrt(6 / (fan in + fan out)): deviation sqrt(2 / (fan in + fan out)).

    Args: as `keras.initializers.GlorotUniform`.

    Source: Glorot and Bengio 2010, proceedings.mlr.press/v9/glorot10a.html, eq. 16.
    """


@_serialisable
class XavierNormal(keras.initializers.GlorotNormal):
    """Normal numbers cut at two deviations, of standard deviation sqrt(2 / (fan in + fan out)) after the cut.

    Args: as `keras.initializers.GlorotNormal`.

    Source: Glorot and Bengio 2010, proceedings.mlr.press/v9/glorot10a.html, eq. 12.
    """


@_serialisable
class HeNormal(keras.initializers.HeNormal):
    """Normal numbers cut at two deviations, of standard deviation sqrt(2 / fan in) after the cut: for relu.

    Args: as `keras.initializers.HeNormal`.

    Source: He et al. 2015, arXiv:1502.01852, eq. 10; on kept weights Evci et al. 2020, arXiv:2010.03533.
    """


@_serialisable
class LecunNormal(keras.initializers.LecunNormal):
    """Normal numbers cut at two deviations, of standard deviation sqrt(1 / fan in) after the cut: for selu and linear.

    Args: as `keras.initializers.LecunNormal`.

    Source: LeCun et al. 1998, "Efficient BackProp", eq. 16; Klambauer et al. 2017, arXiv:1706.02515.
    """


@_serialisable
class Orthogonal(keras.initializers.Orthogonal):
    """`gain` times a matrix with orthonormal columns, or rows where it has fewer of those.

    In `reinitialize` its rows are what an output unit sums over and its columns the output units; each channel of a
    depthwise kernel, each group of a grouped convolution and each row of an embedding is a matrix of its own. Under a
    mask it is masked, and each output unit's weights are scaled back to the norm that they had.

    Args: as `keras.initializers.Orthogonal`.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Reinitialized:
    """A weight that has new values.

    Attributes:
        name: Readable path.
        shape: Its shape.
        kept: Number of weights that the mask keeps; all of them without one.
        fan_in: Number of kept weights that an output unit sums over, on average over the output units.
        fan_out: Number of kept weights that an input unit feeds, on average over the input units.
        std_before: Standard deviation of the kept weights, as they were.
        std_after: The same, as they are.
        output_variance: LSUV: variance of the layer's output, before its activation; None where it was not scaled.
        note: What is worth knowing beside that, or "".
    """

    name: str
    shape: tuple[int, ...]
    kept: int
    fan_in: float
    fan_out: float
    std_before: float
    std_after: float
    output_variance: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Reinitialization:
    """What `reinitialize` changed, what it left alone and why.

    Attributes:
        model: Name of the model.
        initializer: Name of the initializer's class.
        seed: The seed that repeats it.
        weights: The weights with new values, in the model's order.
        skipped: All others.
    """

    model: str
    initializer: str
    seed: int
    weights: tuple[Reinitialized, ...]
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("weight", "shape", "fan in", "fan out", "std before", "std after", "")
        rows = [
            (row.name, "x".join(map(str, row.shape)), f"{row.fan_in:.4g}", f"{row.fan_out:.4g}")
            + (f"{row.std_before:.4g}", f"{row.std_after:.4g}", _remark(row))
            for row in self.weights
        ]
        title = f"{self.model}: {self.initializer}, seed {self.seed}"
        reasons: dict[str, list[str]] = {}
        for item in self.skipped:
            reasons.setdefault(item.reason, []).append(item.name)
        skipped = [f"left alone, {reason}: {', '.join(names)}" for reason, names in reasons.items()]
        return "\n".join([title, *aligned([head, *rows], left=(0, 6)), *skipped])


def _remark(row: Reinitialized) -> str:
    size = math.prod(row.shape)
    parts = [f"{row.kept:,} of {size:,} kept"] if row.kept < size else []
    parts += [f"output variance {row.output_variance:.3g}"] if row.output_variance is not None else []
    return ", ".join([*parts, *([row.note] if row.note else [])])


# ---------------------------------------------------------------- the operation


def reinitialize(
    model: Any,
    initializer: Any,
    *,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    masks: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Reinitialization:
    """Gives a built model new weights, in place; returns what changed and what was left alone.

    Taken are kernels (depthwise and recurrent ones too) and embeddings; biases and other weights where `include` names
    them. Each weight draws from a stream of its own, made of the seed and of the weight's place in the model: what one
    weight gets does not depend on `include`, `exclude`, the masks of others or the names of layers.

    Fans are counted on the table's axes, and over kept weights where there is a mask: with m the mask, the deviation of
    the weight from input unit i to output unit o is sqrt(scale / n), where n is fan_in(o) = sum of m over all weights
    into o, fan_out(i) = sum of m over all weights out of i, or their mean (Xavier). Each output unit has then the
    variance that it would have in a dense layer, however unevenly the zeros fall. Pruned weights are exactly zero.

    An optimizer that trained the old weights keeps their momenta: compile the model anew.

    Args:
        model: A built Keras model or layer.
        initializer: One of this module, any Keras initializer or its name; `LSUV` for a start from data. Other
            initializers than variance scaling and orthogonal ones draw as they are, and are masked.
        include: Names, globs or `re:` patterns of layers and weights; given, nothing else is taken.
        exclude: The same, left out; stronger than `include`.
        masks: Weight name -> boolean array of its shape, True = kept, as `Pruner.masks` gives them. Weights without one
            become dense, also where a Pruner holds zeros. Masks of weights that are not taken change nothing.
        seed: An integer; None takes the initializer's own.

    Raises:
        TypeError: It is no Keras 3 model, no initializer, no integer seed, or a mask is not boolean.
        ValueError: It is not built; a pattern or a mask's name matches nothing; a mask has another shape.

    Source: Evci et al. 2020, arXiv:2010.03533 (He's deviation, each neuron's fan in counted over its kept weights).
    """
    targets, skipped = find_targets(model, include, exclude, also=("depthwise_kernel",))
    kept = _checked_masks(model, masks)
    start, data = _start(initializer)
    seed = _seed_of(data or start) if seed is None else operator.index(seed)
    # Before any weight moves: a model that cannot be called on the data is refused whole.
    outputs = None if data is None else Outputs(model, targets, data.x)
    places = {id(weight.variable): place for place, weight in enumerate(weights_in(model))}
    before = [deviation(target.variable, kept.get(target.name)) for target in targets]
    for target in targets:
        values = draw(start, target, kept.get(target.name), _stream(seed, places[id(target.variable)]))
        target.variable.assign(values)
    scaled = outputs.scale(data) if outputs is not None and data is not None else {}
    rows = [
        _row(target, kept.get(target.name), std, scaled.get(target.name))
        for target, std in zip(targets, before, strict=True)
    ]
    name = type(initializer if data is not None else start).__name__
    return Reinitialization(model.name, name, seed, tuple(rows), tuple(skipped))


def _start(initializer: Any) -> tuple[Any, LSUV | None]:
    """What weights are drawn with, and LSUV where data scale them after that."""
    if isinstance(initializer, LSUV):
        return Orthogonal(gain=initializer.gain), initializer
    if not isinstance(initializer, keras.initializers.Initializer):
        try:
            initializer = keras.initializers.get(initializer)
        except (ValueError, TypeError) as error:
            raise TypeError(
                "An initializer is one of pk.initializers, a Keras initializer or its name, as in "
                f'reinitialize(model, "he_normal"). Received: {initializer!r}.'
            ) from error
    if getattr(initializer, "input_axes", None) is not None:
        raise ValueError(
            "reinitialize takes the axes of each weight from its layer. Received: an initializer with "
            f"input_axes={initializer.input_axes}. Leave `input_axes` and `output_axes` out."
        )
    return initializer, None


def _seed_of(initializer: Any) -> int:
    """The initializer's own seed, as an integer; a random one where it has none."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        return int(np.sum(ops.convert_to_numpy(seed.next()), dtype=np.int64))
    # Python's generator, as Keras does it: `keras.utils.set_random_seed` seeds it.
    return seed if isinstance(seed, int) else random.randint(1, 10**9)


def _stream(seed: int, place: int) -> int:
    """A seed of its own for the weight at that place of the model."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 2**31


def _checked_masks(model: Any, masks: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """The masks as arrays.

    Raises:
        TypeError, ValueError: As `reinitialize`.
    """
    if masks is not None and not isinstance(masks, Mapping):
        raise TypeError(f"`masks` maps weight names to boolean arrays, as Pruner.masks does. Received: {masks!r}.")
    weights = weights_in(model)
    shapes = {weight.name: weight.shape for weight in weights}
    checked = {}
    for name, mask in (masks or {}).items():
        if name not in shapes:
            raise ValueError(
                f"The mask {name!r} is of no weight of the model {model.name!r}. "
                f"{near_misses(name, list(shapes), weights)}"
            )
        array = mask if isinstance(mask, np.ndarray) else ops.convert_to_numpy(mask)
        if array.dtype != bool:
            raise TypeError(
                f"A mask is boolean, True = kept. Received: {array.dtype} for {name!r}. Say which weights are kept, as "
                "in `kernel != 0`."
            )
        if array.shape != shapes[name]:
            raise ValueError(
                f"A mask has the shape of its weight. Received: {array.shape} for {name!r} of shape {shapes[name]}."
            )
        checked[name] = array
    return checked


def _row(target: Target, mask: np.ndarray | None, std_before: float, scaled: Scaled | None) -> Reinitialized:
    fan_in, fan_out = fans(target, mask)
    return Reinitialized(
        name=target.name,
        shape=target.shape,
        kept=target.size if mask is None else int(mask.sum()),
        fan_in=float(fan_in.mean()),
        fan_out=float(fan_out.mean()),
        std_before=std_before,
        std_after=deviation(target.variable, mask),
        output_variance=scaled.output_variance if scaled else None,
        note=scaled.note if scaled else "",
    )
