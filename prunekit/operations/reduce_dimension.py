"""reduce_dimension: (batch, windows, features) -> (batch, windows, fewer), as layers alone or inside a model."""

from __future__ import annotations

from typing import Any

import keras

from prunekit.core.data.calibration import CheckedData, batches_of
from prunekit.core.outputs.baseline import Baseline
from prunekit.techniques.factorize.dimension.dimension_options import DimensionOptions
from prunekit.techniques.factorize.dimension.dimension_report import DimensionReport
from prunekit.techniques.factorize.dimension.reducing import in_model, of_data


def reduce_dimension(  # noqa: PLR0913
    model: Any = None,
    layer: str | None = None,
    data: Any = None,
    *,
    size: int | None = None,
    energy: float | None = None,
    axis: int | str = "features",
    restore: bool = True,
) -> tuple[Any, DimensionReport]:
    """Reduces one dimension of a tensor of three or more to fewer entries: the directions of the largest energy.

    Tensors of shape (batch, windows, 64) become (batch, windows, 8) by an `EinsumDense` layer, which multiplies the
    deviations from the means by the 8 leading principal directions of the features; its transpose restores them with
    the least squared error. No window is mixed with another. Both layers are trainable, and are plain Keras.

    Without a model, from the data alone: returns ((layer that reduces, layer that restores), report).
    With a model and the name of a layer: returns (a new model, report). The layers stand before the named one, and the
    directions are those of its inputs. The given model is not changed; compile settings and the optimizer's state carry
    on.

    Args:
        model: A built Keras model; None = layers alone.
        layer: Name of the layer in whose input a dimension is reduced.
        data: Without a model the tensors, shape (batch, windows, features) or with more dimensions; with a model its
            inputs, as `pk.prune` takes calibration data.
        size: Number of entries that are left.
        energy: Share of the squared deviations from the means that is kept, such as 0.99; the size follows. One of
            `size` and `energy` is given.
        axis: "features" (the last dimension), "windows" (the one after the batch), or its number.
        restore: In a model: True adds the layer that restores, so that the shapes of all layers behind stay. False
            leaves it out, for layers whose weights do not depend on this dimension, such as pooling over windows.

    Raises:
        ValueError: No data; neither or both of `size` and `energy`, or more entries than there are; fewer than three
            dimensions; no such layer, or one whose input has a mask or an open length; without `restore`, weights that
            do not fit.
        TypeError: `model` is not a Keras model; an option has another type.

    Source: De Lathauwer et al. 2000, "A multilinear singular value decomposition" (one factor of it, about the means).
    """
    options = DimensionOptions(size, energy, axis, restore)
    if model is not None and not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is a Keras model. Received: {type(model).__name__}. Pass tensors by name, as data=x, for the "
            "layers alone."
        )
    if data is None:
        raise ValueError("Directions are found from data. Received: data=None. Pass tensors, or inputs of the model.")
    if (model is None) != (layer is None):
        raise ValueError(
            f"A model and the name of one of its layers go together. Received: model={getattr(model, 'name', None)!r}, "
            f"layer={layer!r}. Pass both, or data alone."
        )
    if model is None:
        return of_data((inputs for inputs, _ in batches_of(data)), options)
    checked = CheckedData(model, data)
    made, report = in_model(model, str(layer), (inputs for inputs, _ in batches_of(checked)), options)
    return made, Baseline(model, checked).with_damage(report, "Keep more entries, or train the new model.", made)
