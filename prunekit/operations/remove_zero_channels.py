"""remove_zero_channels: a smaller model without the channels that masks have set to zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prunekit.core.data.calibration import batches_of
from prunekit.techniques.shrink.channels.options import ShrinkOptions
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport
from prunekit.techniques.shrink.channels.shrinking import shrunk


def remove_zero_channels(
    model: Any,
    *,
    minimum: int = 1,
    multiple: int = 1,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    approximate: Sequence[str] | str = (),
    data: Any = None,
) -> tuple[Any, ShrinkReport]:
    """Removes the channels whose kernels are zero; returns (a smaller model, its report). The given model stays.

    This follows a training in which whole channels were pruned by masks. A channel is removed if all kernels that
    compute it, those of all layers of a residual sum, are entirely zero. Biases and normalizations may have made it a
    constant, which is folded into the layers that read it, so that the outputs stay equal. Where that is not exact, as
    before a padded convolution, the report has the error: `report.approximations`.

    Args:
        model: A built Keras model.
        minimum: Smallest number of channels that a group keeps, in each part of a grouped convolution.
        multiple: Rounds the kept channels of each group up to a multiple, such as 8.
        include: Names, globs or `re:` patterns of layers whose channels may be removed; empty = all.
        exclude: Names, globs or `re:` patterns of layers whose channels stay; overrides `include`.
        approximate: Approximations that are allowed, as for `shrink`.
        data: Inputs on whose first two examples constants are observed and errors are measured, as `pk.prune` takes
            calibration data. None = random inputs; axes of open length then have 16 entries.

    Raises:
        ValueError: The model has no channels that can be removed; the model cannot be followed.
        TypeError: `model` is not a Keras 3 model.
    """
    options = ShrinkOptions(
        minimum=minimum, multiple=multiple, include=include, exclude=exclude, repair="none", approximate=approximate
    )
    inputs = None if data is None else next(iter(batches_of(data)))[0]
    found = shrunk(model, None, options, data, inputs=inputs)
    return found.model, found.report
