"""factorize: two or three layers of low rank in the place of one; returns a smaller model."""

from __future__ import annotations

from typing import Any, Unpack

from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.delivery.litert.model_measures import measure_of
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions, number_of_bytes
from prunekit.techniques.factorize.factorize_report import FactorizeReport
from prunekit.techniques.factorize.factorizing import factorize_model
from prunekit.techniques.factorize.options import FactorizeKeywords, FactorizeOptions, Rank, target_of
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats


@keyword_options(FactorizeOptions, FactorizeKeywords)
def factorize(  # noqa: PLR0913
    model: Any,
    *size: Any,
    parameters: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    rank: Rank | None = None,
    energy: float | None = None,
    data: Any = None,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[FactorizeKeywords],
) -> tuple[Any, FactorizeReport]:
    """Replaces layers by several of low rank; returns (a smaller model, its report). The given model is not changed.

    A Dense layer from 800 to 500 becomes one from 800 to 64 and one from 64 to 500. Factorized are Dense and
    EinsumDense layers, also those inside attentions, convolutions (in one of three forms), and embedding tables; layers
    that would not become smaller, and layers of other kinds, stay as they are. The new model has the same inputs and
    outputs, loads without prunekit, and keeps names, compile settings and the optimizer's state, so that training goes
    on.

    Args:
        model: A built Keras model.
        *size: Nothing: a size needs its name.
        parameters: Share of the model's parameters that is left. The ranks are those of the least error.
        macs: Share of the multiply-accumulates of one example that is left.
        bytes: Share of the bytes of the exported LiteRT file (float32) that is left. Files are exported until one fits.
        latency: Share of this file's latency on this machine that is left, in LiteRT on one thread.
        rank: Number of values between the layers; or ranks by patterns, {"head": 16, "block_*": "full"}: others
            stay as they are.
        energy: Share of the squared outputs of each layer that is kept, such as 0.99. Exactly one of the six is given.
        data: Calibration data, as `pk.prune` takes them. None = synthetic inputs (random signals), which lose more.
        memory: Largest number of bytes of activations that are kept between layers; with less, those of wide layers are
            computed again, which takes time and changes no result.
        progress: Told of each weight: (done, total, name).
        **options: `form`, `correct_biases`, `tolerance`, `include`, `exclude`: see `FactorizeOptions`.

    Raises:
        ValueError: No target, or several; the target cannot be reached; no layer becomes smaller; the model's calls
            cannot be followed; data are not finite or do not fit; bytes or latency cannot be measured here: they need
            the TensorFlow backend and ai-edge-litert.
        TypeError: `model` is not a Keras 3 model; an option is unknown; a size has no name.

    Source: Zhang et al. 2015, arXiv:1505.06798 (low rank by the principal components of a layer's outputs);
        Jaderberg et al. 2014, arXiv:1405.3866 ("separable"); Kim et al. 2016, arXiv:1511.06530 ("tucker").
    """
    if size:
        raise TypeError(
            f"The size is named: pass parameters={size[0]!r}, the share that is left, or rank={size[0]!r}. Received: "
            f"{size[0]!r} without a name."
        )
    target = target_of(
        {"parameters": parameters, "macs": macs, "bytes": bytes, "latency": latency, "rank": rank, "energy": energy}
    )
    check_functions(progress=progress)
    chosen, memory = FactorizeOptions(**options), number_of_bytes("memory", memory)
    check_computes_in_floats(model)
    checked = None if data is None else CheckedData(model, data)
    with measure_of(target.measure, model) as measure:
        found = factorize_model(model, target, chosen, checked, measure=measure, memory=memory, progress=progress)
    if checked is None:
        return found.model, found.report
    remedy = "Keep more, or train the smaller model for some epochs."
    return found.model, Baseline(model, checked).with_damage(found.report, remedy, found.model)
