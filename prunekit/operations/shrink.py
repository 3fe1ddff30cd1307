"""shrink: removes channels from a model and returns a smaller model, for calculated and for measured targets."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any, Literal, Unpack

from prunekit.anatomy.channels.channels import find_channels
from prunekit.anatomy.graph.example_inputs import symbolic_call
from prunekit.core.data.calibration import CheckedData, batches_of
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.delivery.litert.model_measures import measure_of
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions, number_of_bytes
from prunekit.sparsity.shorthands import MEASURES, NONZERO
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats
from prunekit.techniques.shrink.channels.budget import SizeModel
from prunekit.techniques.shrink.channels.options import ShrinkKeywords, ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport
from prunekit.techniques.shrink.channels.shrinking import ChannelRemoval, remove_channels


@keyword_options(ShrinkOptions, ShrinkKeywords)
def shrink(  # noqa: PLR0913
    model: Any,
    *size: Any,
    channels: float | Literal["nonzero"] | None = None,
    parameters: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    data: Any = None,
    inputs: Any = None,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[ShrinkKeywords],
) -> tuple[Any, ShrinkReport]:
    """Removes channels; returns (a smaller model, its report). The given model is not changed.

    A channel is removed from every weight in which it occurs: the filter that computes it, the normalization after it,
    and the inputs of the layers that read it. The new model computes what the model computes with zeros in all these
    entries. It has the same inputs and outputs, loads without prunekit, and keeps names, compile settings and the
    optimizer's state, so that training goes on.

    Args:
        model: A built Keras model.
        *size: Nothing: a size needs its name.
        channels: Share of the removable channels that is left, in (0, 1]. Or "nonzero": the channels are removed whose
            kernels are zero, as after a training that pruned whole channels. A bias or a normalization may have made
            such a channel a constant, which is folded into the layers that read it; where that is not exact, as before
            a padded convolution, `report.approximations` has the error on the first two examples of `data` or on
            random inputs.
        parameters: Share of the model's parameters that is left.
        macs: Share of the multiply-accumulates of one example that is left.
        bytes: Share of the bytes of the exported LiteRT file (float32) that is left. Files are exported until one fits.
        latency: Share of this file's latency on this machine that is left, in LiteRT on one thread; measured with both
            files by turns. Exactly one of the five is given.
        data: Calibration data, as `pk.prune` takes them. With data the kept weights are repaired.
        inputs: Example inputs, or their shapes, for a target in `macs` or `latency` of a model whose inputs have no
            fixed size.
        memory: Largest number of bytes of activations that are kept between layers while the kept weights are
            repaired; with less, those of wide layers are computed again, which takes time and changes no result.
        progress: Told of each measured model and of each repaired layer: (done, total, text).
        **options: `criterion`, `reduction`, `normalize`, `allocation`, `minimum`, `multiple`, `include`, `exclude`,
            `repair`, `tolerance`, `approximate`: see `pk.ShrinkOptions`.

    Raises:
        ValueError: No target, or several; the target cannot be reached: the message has the reachable range; the
            criterion needs data; no channel can be removed; the model cannot be followed; bytes or latency cannot be
            measured here: they need the TensorFlow backend and ai-edge-litert.
        TypeError: `model` is not a Keras 3 model; an option is unknown; a size has no name.
    """
    if size:
        raise TypeError(
            f"The size is named: pass one of {', '.join(MEASURES)} as the share that is left. Received: {size[0]!r} "
            f"without a name. To keep a share of the channels: pk.shrink(model, channels={size[0]!r})."
        )
    given = dict(zip(MEASURES, (channels, parameters, macs, bytes, latency), strict=True))
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) != 1:
        raise ValueError(
            f"One target says how small the model becomes: {', '.join(given)}. Received: {', '.join(asked) or 'none'}. "
            "Pass exactly one, as the share that is left: channels=0.5."
        )
    check_functions(progress=progress)
    chosen, memory = ShrinkOptions(**options), number_of_bytes("memory", memory)
    check_computes_in_floats(model)
    if inputs is not None:
        symbolic_call(model, 1, inputs)
    _check_count(model, *next(iter(asked.items())), chosen)
    if isinstance(channels, str) and channels != NONZERO:
        raise ValueError(f'channels is the share that is left, in (0, 1], or "{NONZERO}". Received: {channels!r}.')
    if channels == NONZERO:
        return _remove_zero_channels(model, chosen, options, data, inputs)
    target = SizeTarget(*asked.popitem())  # type: ignore[arg-type]
    checked = None if data is None else CheckedData(model, data)
    found = shrink_to(model, target, chosen, checked, inputs=inputs, progress=progress, memory=memory)
    if checked is None:
        return found.model, found.report
    remedy = "Keep more, or train the smaller model for some epochs."
    return found.model, Baseline(model, checked).with_damage(found.report, remedy, found.model)


def shrink_to(
    model: Any,
    target: SizeTarget | None,
    options: ShrinkOptions,
    data: Any = None,
    *,
    inputs: Any = None,
    memory: float = MEMORY,
    progress: Progress | None = None,
) -> ChannelRemoval:
    """Returns the smaller model of `shrink`, for ready options, with what a recipe carries over to it.

    Args:
        model: A built Keras model.
        target: How much is left, calculated or measured; None removes the channels whose kernels are zero.
        options: Which channels are removed, and the repair.
        data: Calibration data, or None.
        inputs: As for `shrink`.
        memory: As for `shrink`.
        progress: As for `shrink`.

    Raises:
        ValueError, TypeError: As for `shrink`.
    """
    with measure_of("channels" if target is None else target.measure, model, inputs) as measure:
        return remove_channels(
            model, target, options, data, inputs=inputs, measure=measure, progress=progress, memory=memory
        )


def _remove_zero_channels(
    model: Any, options: ShrinkOptions, given: ShrinkKeywords, data: Any, inputs: Any
) -> tuple[Any, ShrinkReport]:
    idle = [name for name in given if name not in ("minimum", "multiple", "include", "exclude", "approximate")]
    if idle:
        raise ValueError(
            f'channels="{NONZERO}" removes the channels whose kernels are zero. Received: {", ".join(idle)}, without '
            "effect there. Leave it out."
        )
    examples = inputs if data is None else next(iter(batches_of(data)))[0]
    found = shrink_to(model, None, replace(options, repair="none"), data, inputs=examples)
    return found.model, found.report


def _check_count(model: Any, measure: str, value: Any, options: ShrinkOptions) -> None:
    """Refuses a number of channels or parameters where their share is wanted; the error has the share."""
    # The command line has read a count as 8.0.
    is_count = isinstance(value, Real) and float(value) >= 2 and float(value).is_integer()
    if measure not in ("channels", "parameters") or not is_count:
        return
    found = find_channels(model, options.approximate)
    channels = sum(group.channels.size for group in found.groups)
    total = channels if measure == "channels" else SizeModel(found).parameters
    count = int(value)
    if count <= total:
        kind = "removable channels" if measure == "channels" else measure
        raise ValueError(
            f"{measure} is the share that is left, in (0, 1]. Received: {measure}={count}. To keep {count} of the "
            f"model's {total:,} {kind}, pass {measure}={count / total:.4g}."
        )
