"""Weight initializers, and reinitialization of a built model with correct axes, under masks, or from data.

    reinitialize(model, HeNormal(), masks=pruner.masks, seed=7)
    signal_report(model, x)

Variance-scaling initializers draw weights with standard deviation sqrt(scale / n). As a layer's `kernel_initializer`
they behave as in Keras: n is derived from the kernel's shape, which is wrong for transposed, depthwise and grouped
convolutions and for embeddings. `reinitialize` takes n from the axes in the table of layer types, and counts only the
weights that the mask keeps.
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

from prunekit.anatomy.layers.fans import fans
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.anatomy.records.name_patterns import near_misses
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.tables import aligned
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
    """Draws normal numbers and redraws numbers further than 2 `stddev` from `mean`.

    `stddev` is the standard deviation of the normal distribution before truncation; the drawn numbers have a standard
    deviation of 0.8796 `stddev`. Masks do not change `stddev`.

    Args:
        stddev: Standard deviation before truncation, above 0.
        mean: Mean.
        seed: An integer, or a `keras.random.SeedGenerator`; None draws a random seed.

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
    """Draws uniformly from [-l, l], l = sqrt(6 / (fan in + fan out)): standard deviation sqrt(2 / (fan in + fan out)).

    Args: as `keras.initializers.GlorotUniform`.

    Source: Glorot and Bengio 2010, proceedings.mlr.press/v9/glorot10a.html, eq. 16.
    """


@_serialisable
class XavierNormal(keras.initializers.GlorotNormal):
    """Draws truncated normal numbers; standard deviation after truncation: sqrt(2 / (fan in + fan out)).

    Args: as `keras.initializers.GlorotNormal`.

    Source: Glorot and Bengio 2010, proceedings.mlr.press/v9/glorot10a.html, eq. 12.
    """


@_serialisable
class HeNormal(keras.initializers.HeNormal):
    """Draws truncated normal numbers for relu; standard deviation after truncation: sqrt(2 / fan in).

    Args: as `keras.initializers.HeNormal`.

    Source: He et al. 2015, arXiv:1502.01852, eq. 10; on kept weights Evci et al. 2020, arXiv:2010.03533.
    """


@_serialisable
class LecunNormal(keras.initializers.LecunNormal):
    """Draws truncated normal numbers for selu and linear; standard deviation after truncation: sqrt(1 / fan in).

    Args: as `keras.initializers.LecunNormal`.

    Source: LeCun et al. 1998, "Efficient BackProp", eq. 16; Klambauer et al. 2017, arXiv:1706.02515.
    """


@_serialisable
class Orthogonal(keras.initializers.Orthogonal):
    """Draws `gain` times a matrix with orthonormal columns, or with orthonormal rows if it has fewer rows than columns.

    In `reinitialize` the columns are the output units and the rows are the weights that an output unit sums over. Each
    channel of a depthwise kernel, each group of a grouped convolution and each row of an embedding is a separate
    matrix. Under a mask, each output unit's kept weights are rescaled to the norm of its weights before masking.

    Args: as `keras.initializers.Orthogonal`.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Reinitialized:
    """One reinitialized weight.

    Attributes:
        name: Readable path.
        shape: Shape of the weight.
        kept: Number of entries that the mask keeps; without a mask, the number of all entries.
        fan_in: Number of kept weights that an output unit sums over, on average over the output units.
        fan_out: Number of kept weights that an input unit feeds, on average over the input units.
        std_before: Standard deviation of the kept weights before the reinitialization.
        std_after: Standard deviation of the kept weights after the reinitialization.
        output_variance: LSUV: variance of the layer's output before its activation; None if LSUV did not scale it.
        note: A remark about this weight, or "".
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
    """The result of `reinitialize`: the changed weights, and the skipped weights with reasons.

    Attributes:
        model: Name of the model.
        initializer: Name of the initializer's class.
        seed: The seed that reproduces the new values.
        weights: The weights with new values, in the model's order.
        skipped: All other weights, with reasons.
    """

    model: str
    initializer: str
    seed: int
    weights: tuple[Reinitialized, ...]
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        """All fields as a dictionary that can be written as JSON."""
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
    """Reinitializes the weights of a built model in place; returns a report of changed and skipped weights.

    By default kernels (also depthwise and recurrent kernels) and embeddings are reinitialized; biases and other weights
    only if `include` names them. Each weight has a separate random stream, derived from `seed` and the weight's
    position in the model: its values do not depend on `include`, `exclude`, other weights' masks or layer names.

    Fans are counted along the axes in the table of layer types, over kept weights only. With the mask m, the standard
    deviation of the weight from input unit i to output unit o is sqrt(scale / n), where n is fan_in(o) = sum of m over
    all weights into o, fan_out(i) = sum of m over all weights out of i, or their mean (Xavier). Each output unit then
    has the same variance as in a dense layer, for any distribution of the zeros. Pruned weights are exactly zero.

    The optimizer keeps the momenta of the old weights; call `model.compile` again to reset the optimizer.

    Args:
        model: A built Keras model or layer.
        initializer: An initializer of this module, a Keras initializer or its name; `LSUV` initializes from data.
            Initializers other than variance-scaling and orthogonal initializers are called unchanged, then masked.
        include: Names, globs or `re:` patterns of layers and weights; if given, only matching weights are changed.
        exclude: Names or patterns of layers and weights to skip; takes precedence over `include`.
        masks: Weight name -> boolean array of the weight's shape, True = kept, as in `Pruner.masks`. Weights without a
            mask become dense, even weights that a Pruner holds at zero. Masks of skipped weights have no effect.
        seed: An integer; None: the initializer's seed.

    Raises:
        TypeError: `model` is not a Keras 3 model, `initializer` is not an initializer, `seed` is not an integer, or a
            mask is not boolean.
        ValueError: `model` is not built; a pattern or a mask's name matches nothing; a mask has the wrong shape.

    Source: Evci et al. 2020, arXiv:2010.03533 (He's deviation, each neuron's fan in counted over its kept weights).
    """
    targets, skipped = find_targets(model, include, exclude, also=("depthwise_kernel",))
    kept = _checked_masks(model, masks)
    start, data = _start(initializer)
    seed = _seed_of(data or start) if seed is None else operator.index(seed)
    # Before the first assignment: if the model cannot be called on the data, no weight may have changed.
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
    """(the initializer that draws the weights, the LSUV options or None)."""
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
    """The initializer's seed as an integer; a random seed if it has none."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        return int(np.sum(ops.convert_to_numpy(seed.next()), dtype=np.int64))
    # Python's `random`, as in Keras: `keras.utils.set_random_seed` seeds this generator.
    return seed if isinstance(seed, int) else random.randint(1, 10**9)


def _stream(seed: int, place: int) -> int:
    """The seed for the weight at position `place` in the model."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 2**31


def _checked_masks(model: Any, masks: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """The masks as boolean NumPy arrays, by weight name.

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
                f"The mask {name!r} belongs to no weight of the model {model.name!r}. "
                f"{near_misses(name, list(shapes), [weight.name for weight in weights])}"
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
