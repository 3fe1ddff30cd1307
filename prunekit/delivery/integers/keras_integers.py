"""Writes a Keras file in which layers are Keras's own int8 and int4 layers, with codes and scales of a quantization."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.layers.layers import cell_of
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.integers.integer_report import IntegerExport, IntegerExportError
from prunekit.delivery.litert.export_reference import ReferenceModel
from prunekit.delivery.litert.isolated_run import Comparison, ExportRejected, compare
from prunekit.delivery.litert.keras_file import kept, save, saved_and_loaded, temporary
from prunekit.delivery.reports.formatting import names
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import Grid
from prunekit.techniques.quantize.placement.placement import LayerOpener
from prunekit.techniques.quantize.quantization_state import QuantizationState, unique_weights
from prunekit.techniques.shrink.channels.optimizer_state import class_notes
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_copies import Variables
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

# Layers that Keras has in int8, not their subclasses -> their weights, in the order in which Keras asks for codes.
_INT8 = {
    getattr(keras.layers, kind): weights
    for kind, weights in (
        ("Dense", ("kernel",)),
        ("EinsumDense", ("kernel",)),
        ("Embedding", ("embeddings",)),
        ("ReversibleEmbedding", ("embeddings", "reverse_embeddings")),
    )
    if hasattr(keras.layers, kind)
}
# Layers that Keras has in int4 with a scale for each group of inputs; the first versions with int4 have no groups.
_INT4 = tuple(
    getattr(keras.layers, kind)
    for kind in ("Dense", "EinsumDense", "Embedding")
    if hasattr(keras.quantizers, "Int4QuantizationConfig")
    and "block_size" in inspect.signature(keras.quantizers.Int4QuantizationConfig).parameters
)
# Largest and mean difference of a file's outputs from the model's, as fractions of their range: another order of the
# same multiplications, in float32 and in half precision.
_SAME, _SAME_IN_HALF = (1e-4, 1e-4), (0.1, 0.02)
# Most bits of the codes of int4 layers.
_MOST_BITS_OF_INT4 = 4
# Most layers that a note names.
_LISTED = 8


def export_keras_integers(
    found: QuantizationState, samples: Any, target: Path, float_outputs: list[np.ndarray] | None
) -> IntegerExport:
    """Writes a Keras file with int8 and int4 layers, which compute in floating point; returns how it compares.

    Args:
        found: The quantized model; it is not changed.
        samples: Examples in the model's input structure.
        target: Name of the file.
        float_outputs: Outputs of the model before its quantization for the samples; None if they are not known.

    Raises:
        IntegerExportError: No layer would have integers, the model cannot be copied, or the file does not load or
            computes something else. No file is written then.
    """
    copy = _integer_copy(found)
    with contextlib.ExitStack() as scratch, temporary(target) as path:
        subject = ReferenceModel(found.model, samples, None, None, scratch)
        try:
            loaded, _ = saved_and_loaded(copy.model, path)
            answers = subject.answers(loaded)
            same = compare(subject.reference, answers, None, subject.loss)
        except ExportRejected as error:
            raise IntegerExportError(f"The Keras file is not written: {error}.") from error
        _check(same, found.model)
        before = None if float_outputs is None else compare(float_outputs, answers, None, subject.loss)
        size, compressed = kept(path, target)
    float_bytes = _float_bytes(found, target, size)
    notes = _notes(found, copy, size, float_bytes)
    return IntegerExport(
        str(target),
        size,
        compressed,
        float_bytes,
        copy.skipped,
        (),
        same,
        before,
        notes,
        int8_layers=copy.int8_layers,
        int4_layers=copy.int4_layers,
    )


@dataclass(frozen=True, eq=False)
class _IntegerCopy:
    """A copy of a quantized model with layers of integers.

    Attributes:
        model: The copy.
        int8_layers: Names of its int8 layers.
        int4_layers: Names of its int4 layers.
        skipped: The other weights that lie on grids, with reasons.
        opened: Names of the layers that are replaced by the calls inside them.
    """

    model: Any
    int8_layers: tuple[str, ...]
    int4_layers: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    opened: tuple[str, ...]


def _integer_copy(found: QuantizationState) -> _IntegerCopy:
    model = found.model
    adapted = [layer.name for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    if adapted:
        raise IntegerExportError(
            "Keras saves LoRA weights as a part of the kernel, which then lies on no grid. Received: LoRA in the "
            f"layers {names(adapted, _LISTED)}. Assign the sums, `layer.kernel`, to a model without LoRA, and quantize "
            "that."
        )
    if not any(_integer_weights(layer, found.weights) for layer in model._flatten_layers()):
        raise _no_integers(found, set())
    opener = _Opener(found)
    try:
        made, variables = _built(model, opener)
    except ValueError as error:
        raise IntegerExportError(f"The Keras file holds a copy of the model, which cannot be made. {error}") from error
    former = {id(new): old for old, new in variables.values()}
    grids = {key: found.weights[id(old)] for key, old in former.items() if id(old) in found.weights}
    done, int8_layers, int4_layers = set[int](), list[str](), list[str]()
    for layer in _saved_layers(made):
        weights = _integer_weights(layer, grids)
        if not weights:
            continue
        done.update(id(former[id(one)]) for one in weights)
        first, *others = [grids[id(one)] for one in weights]
        if first.granularity.group_size is None:
            _make_int8(layer, [first, *others])
            int8_layers.append(layer.name)
        else:
            _make_int4(layer, array_of(weights[0]).astype("float32"), first)
            int4_layers.append(layer.name)
    if not done:
        raise _no_integers(found, done)
    skipped = _skipped(found, done) + _copies(found, done, {*int8_layers, *int4_layers})
    return _IntegerCopy(made, tuple(int8_layers), tuple(int4_layers), skipped, tuple(opener.opened))


def _built(model: Any, opener: _Opener) -> tuple[Any, Variables]:
    """Returns a copy of a model, with opened layers if it can be made so, and the new variable of each former one."""
    if opener.is_needed:
        with contextlib.suppress(ValueError):
            return build(LayerGraph(model, opener))
        opener.opened.clear()
    return build(LayerGraph(model))


def _integer_weights(layer: Any, grids: Mapping[int, Grid]) -> list[Any]:
    """Returns the weights of a layer that Keras has as integers; [] for another layer, or if one lies on no grid.

    Args:
        layer: A layer.
        grids: id of a variable -> its grid.
    """
    # Keras refuses float16, where sums of codes overflow.
    if type(layer) not in _INT8 or layer.compute_dtype == "float16":
        return []
    attributes = [name for name in _INT8[type(layer)] if hasattr(layer, name)]
    weights = [getattr(layer, name) for name in attributes]
    return weights if all(id(one) in grids and _is_storable(layer, grids[id(one)]) for one in weights) else []


def _is_storable(layer: Any, grid: Grid) -> bool:
    """Returns True if Keras has the scales of a grid for this type of layer."""
    axes, rank = grid.granularity.axes, grid.scale.ndim
    if grid.granularity.group_size is None:
        return True
    if type(layer) not in _INT4 or grid.format.bits > _MOST_BITS_OF_INT4:
        return False
    # Keras counts groups along the first axes of the kernel of an EinsumDense, whatever their labels are.
    return type(layer) is keras.layers.Embedding or axes == tuple(range(rank - len(axes), rank))


class _Opener:
    """Returns the calls inside a layer with layers that become integers: Keras does not save the latter's settings.

    Args:
        found: The quantized model.

    Attributes:
        opened: Names of the layers that were opened, as a set in order.
    """

    def __init__(self, found: QuantizationState):
        self._grids, self._open = found.weights, LayerOpener({})
        self.opened: dict[str, None] = {}
        self.is_needed = any(self._holds_integers(layer) for layer in found.model._flatten_layers(include_self=False))

    def __call__(self, node: Any) -> Any:
        layer = getattr(node, "operation", None)
        if not isinstance(layer, keras.layers.Layer) or not self._holds_integers(layer):
            return None
        found = self._open(node)
        if found is not None:
            self.opened[layer.name] = None
        return found

    def _holds_integers(self, layer: Any) -> bool:
        if graph_of(layer) is not None or cell_of(layer) is not None:
            return False
        return any(_integer_weights(inner, self._grids) for inner in layer._flatten_layers(include_self=False))


def _saved_layers(model: Any) -> Iterator[Any]:
    """Yields the layers whose settings are in a model's file: those in its graph, and in the graphs of nested models.

    Not the layer in a TimeDistributed, which calls `layer.call`, and so computes with the codes alone.
    """
    for layer in model.layers:
        if graph_of(layer) is not None:
            yield from _saved_layers(layer)
        else:
            yield layer


def _make_int8(layer: Any, grids: list[Grid]) -> None:
    """Makes a layer int8 for weights alone, with the codes and scales of grids."""
    settings: Callable[..., Any] = keras.quantizers.Int8QuantizationConfig
    layer.quantize("int8", config=settings(_GivenCodes(grids), activation_quantizer=None))
    # The file must not name a class of prunekit.
    layer.quantization_config = settings(activation_quantizer=None)


def _make_int4(layer: Any, value: np.ndarray, grid: Grid) -> None:
    """Makes a layer int4, with the codes of a value on a grid with groups, and its scales; zero points are 0.

    Args:
        layer: The layer.
        value: Its kernel or table.
        grid: The grid.
    """
    codes, scale = np.asarray(grid.codes(value)).astype("int8"), grid.scale
    if not isinstance(layer, keras.layers.Embedding):
        outputs = int(np.prod([value.shape[axis] for axis in grid.granularity.axes]))
        codes, scale = codes.reshape(-1, outputs), scale.reshape(-1, outputs)
    packed, _, _ = keras.quantizers.pack_int4(keras.ops.convert_to_tensor(codes), axis=-1)
    name = _INT8[type(layer)][0]
    layer.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=grid.granularity.group_size))
    stored = {variable.name: variable for variable in layer.variables}
    stored[name].assign(packed)
    stored[f"{name}_scale"].assign(scale)
    stored[f"{name}_zero"].assign(np.zeros(scale.shape, "int8"))


class _GivenCodes(keras.quantizers.Quantizer):
    """Returns codes on given grids, and scales as Keras divides by them.

    Args:
        grids: The grid of each weight, in the order of the calls.
    """

    def __init__(self, grids: list[Grid]):
        super().__init__(output_dtype="int8")
        self._grids = iter(grids)

    def __call__(self, x: Any, to_numpy: bool = True) -> tuple[np.ndarray, np.ndarray]:
        grid = next(self._grids)
        codes = grid.codes(array_of(x).astype("float32")).astype("int8")
        return codes, (1.0 / grid.scale.astype("float64")).astype("float32")


def _skipped(found: QuantizationState, done: set[int]) -> tuple[Skipped, ...]:
    """Returns the weights on grids that are no integers in the file, with reasons.

    Args:
        found: The quantized model.
        done: ids of the variables that are integers.
    """
    layers = {id(weight.variable): weight.layer for weight in weights_in(found.model)}
    left = [one for one in unique_weights(found.placement) if id(one.variable) not in done]
    return tuple(Skipped(one.name, _reason(layers[id(one.variable)], found.weights[id(one.variable)])) for one in left)


def _copies(found: QuantizationState, done: set[int], stored: set[str]) -> tuple[Skipped, ...]:
    """Returns the layers that hold a weight of another layer, which alone is integers in the file, with reasons.

    Args:
        found: The quantized model.
        done: ids of the variables that are integers.
        stored: Names of the layers with integers.
    """
    holders: dict[int, list[str]] = {}
    for layer in found.model._flatten_layers():
        for variable in {id(one): one for one in getattr(layer, "_trainable_variables", [])}.values():
            holders.setdefault(id(variable), []).append(layer.name)
    return tuple(
        Skipped(name, f"the file holds a copy of the weight that it shares with {names[0]}")
        for key, names in holders.items()
        if key in done
        for name in names[1:]
        if name not in stored
    )


def _reason(layer: Any, grid: Grid) -> str:
    if type(layer) not in _INT8:
        return f"Keras has no int8 form of {type(layer).__name__}"
    if layer.compute_dtype == "float16":
        return "Keras has no int8 form for float16"
    if not _is_storable(layer, grid):
        return "Keras has groups with at most 4 bits, in Dense, Embedding, and EinsumDense with its inputs first"
    return "it is inside of a layer that does not compute or save it in int8"


def _no_integers(found: QuantizationState, done: set[int]) -> IntegerExportError:
    left = names([f"{one.name} ({one.reason})" for one in _skipped(found, done)], _LISTED)
    kinds = ", ".join(kind.__name__ for kind in _INT8)
    return IntegerExportError(
        f"Keras has int8 forms of the layers {kinds}, not of convolutions, recurrent layers and subclasses. Received: "
        f"a model without a quantized one: {left or 'no quantized weight'}. Write a LiteRT file, "
        'export("NAME.tflite"), which has integers for all of them; on the command line, -o NAME.tflite.'
    )


def _check(same: Comparison, model: Any) -> None:
    """Raises if a file computes something else than the model."""
    full = all(one.compute_dtype in (None, "float32", "float64") for one in model._flatten_layers())
    largest, mean = _SAME if full else _SAME_IN_HALF
    if not (same.max_error <= largest and same.mean_error <= mean):
        raise IntegerExportError(
            "The outputs of a Keras file with int8 layers are those of the model. Received: a largest difference of "
            f"{same.max_error:.3g} and a mean one of {same.mean_error:.3g} of the outputs' range (allowed: "
            f"{largest:g} and {mean:g}). The file is not written. Report this model to prunekit."
        )


def _float_bytes(found: QuantizationState, target: Path, size: int) -> int:
    """Returns the size of the float32 file; writes it only where the int8 file may have grown."""
    weights = found.report.bytes[0]
    if size < weights:
        return weights
    with temporary(target) as path, contextlib.suppress(ExportRejected):
        save(found.model, path)
        return path.stat().st_size
    return weights


def _notes(found: QuantizationState, copy: _IntegerCopy, size: int, float_bytes: int) -> tuple[str, ...]:
    notes = class_notes(found.model, copy.model)
    few = sorted({one.bits for one in found.report.weights if one.bits < 8 and one.group_size is None})
    if found.formats.activations is not None:
        notes.append(
            "The tensors between layers stay in floating point: Keras's layers have no ranges for them. The file is "
            "compared with the model whose weights alone are integers."
        )
    if few:
        codes = " or ".join(map(str, few))
        notes.append(f"Each code of {codes} bits takes 8 bits in the file; after compression it takes fewer.")
    if copy.opened:
        notes.append(
            "Replaced by the layers and operations inside them, whose int8 settings Keras would not save: "
            f"{names(list(copy.opened), _LISTED)}."
        )
    if size >= float_bytes:
        notes.append(
            f"The file is not smaller than the float32 file ({size:,} and {float_bytes:,} bytes): scales and settings "
            "of the layers need more than the integers save."
        )
    return tuple(notes)
