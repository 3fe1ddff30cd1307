"""Builds the integer file of a mixture: channels removed, low rank, zeros, integers.

In each step, layers are fitted to their former outputs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.core.layerwise.layerwise import LayerwiseRepair
from prunekit.core.runtime.model_copies import copied_model
from prunekit.delivery.integers.integer_writing import EXAMPLES, KnownOutputs, export_integers
from prunekit.delivery.packing.decoder import LITERT
from prunekit.delivery.packing.encoder import encode
from prunekit.delivery.packing.litert_tensors import litert_pieces
from prunekit.searching.candidates import Level, LevelSolver
from prunekit.searching.costs import Mixture
from prunekit.searching.judge import batched
from prunekit.searching.searched_model import CRITERION, SearchedModel
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.factorizing import with_structures
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.techniques.shrink.channels.options import KeptChannels, ShrinkOptions
from prunekit.techniques.shrink.channels.shrinking import remove_channels


@dataclass(frozen=True)
class FileForm:
    """What is written for a target.

    Attributes:
        packed: True packs the file as well.
        integer_io: What of "inputs" and "outputs" is integers instead of float32.
        full_integer: True: nothing computes in floating point.
    """

    packed: bool = False
    integer_io: tuple[str, ...] = ()
    full_integer: bool = False


# Examples of a batch to which layers are fitted; large ones are faster where a layer has thousands of inputs.
_BATCH = 128
# What is written, by target.
FORMS = {
    "litert": FileForm(),
    "packed": FileForm(packed=True),
    "microcontroller": FileForm(integer_io=("inputs", "outputs"), full_integer=True),
}


@dataclass(frozen=True, eq=False)
class Built:
    """A mixture as a file.

    Attributes:
        state: The quantized model.
        arrays: Name of a weight whose level was chosen -> names of what the model has in its place: the weight itself,
            or arrays of low rank.
        file: The LiteRT file.
        packed: The packed file; b"" where none was wanted.
        outputs: What the file computes for the samples.
    """

    state: QuantizationState
    arrays: Mapping[str, tuple[str, ...]]
    file: bytes
    packed: bytes
    outputs: list[np.ndarray]

    @property
    def model(self) -> Any:
        """The Keras model, whose weights lie on their grids."""
        return self.state.model

    @property
    def bytes(self) -> int:
        """Bytes of the packed file, or of the LiteRT file."""
        return len(self.packed or self.file)


def build(
    subject: SearchedModel, mixture: Mixture, inputs: Any, samples: Any, form: FileForm, *, memory: float
) -> Built:
    """Returns a mixture as a file that was run and compared with its simulation.

    Args:
        subject: The model; it is not changed.
        mixture: What is done with it.
        inputs: Calibration inputs.
        samples: Inputs for which the file is run.
        form: What is written.
        memory: Largest number of bytes of activations that are kept between layers.

    Raises:
        IntegerExportError: The file does not compute what its simulation does.
    """
    batches = batched(inputs, _BATCH)
    kept = {name: count for name, count in mixture.kept.items() if count < subject.orders[name].total}
    options = ShrinkOptions(criterion=CRITERION, repair="weights")
    if kept:
        model = remove_channels(subject.model, KeptChannels(kept), options, batches, memory=memory).model
    else:
        model = copied_model(subject.model)
    model, arrays = _with_low_rank(model, mixture, batches, memory)
    levels = levels_of(mixture, arrays)
    _prune(subject, model, levels, batches, memory)
    rounding = replace(subject.preparation.options, bits=bits_of(levels), method="gptq")
    rates = {name: level.rate for name, level in levels.items()}
    state = quantize_model(model, rounding, batches, memory=memory, rates=rates)
    return write_file(state, arrays, samples, form)


def levels_of(mixture: Mixture, arrays: Mapping[str, Sequence[str]]) -> dict[str, Level]:
    """Returns the level of each array of a model that was built; see `Built.arrays`."""
    return {array: mixture.levels[name] for name, found in arrays.items() for array in found}


def bits_of(levels: Mapping[str, Level]) -> Any:
    """Returns the option `bits` for the levels of arrays; weights without a level have 8 bits."""
    return {name: level.bits or 8 for name, level in levels.items()} or 8


def write_file(state: QuantizationState, arrays: Mapping[str, tuple[str, ...]], samples: Any, form: FileForm) -> Built:
    """Returns a quantized model as a file that was run and compared with its simulation; arguments as for `build`."""
    # The file is compared on a few samples; a simulation of all would take longer than everything else.
    few = keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf[:EXAMPLES]), samples)

    def outputs_of_few() -> list[np.ndarray]:
        return [array_of(one).astype("float32") for one in keras.tree.flatten(state.model(few, training=False))]

    # The file may differ from the simulation by some of what the rounding of tensors changes.
    floats = outputs_of_few()
    with state.simulating():
        known = KnownOutputs(floats, outputs_of_few())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tflite")
        _, outputs = export_integers(state, samples, path, known, integer_io=form.integer_io)
        file = path.read_bytes()
    return Built(state, arrays, file, encode(litert_pieces(file), file, LITERT).data if form.packed else b"", outputs)


def _with_low_rank(
    model: Any, mixture: Mixture, batches: Sequence[Any], memory: float
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Returns a model with the low ranks of a mixture, and the names of its arrays; see `Built.arrays`."""
    structures = {name: one.structure for name, one in mixture.levels.items() if one.structure is not None}
    layers: dict[str, tuple[str, ...]] = {}
    new: dict[str, str] = {}
    if structures:
        model, layers = with_structures(model, structures, batches, memory=memory)
        new = {target.layer.name: target.name for target in weights_of(model)}
    return model, {name: (*(new[layer] for layer in layers.get(name, ())), name) for name in mixture.levels}


def weights_of(model: Any) -> list[Target]:
    """Returns the weights that may have levels."""
    return find_targets(model, also=("depthwise_kernel", "embedding"))[0]


def _sparsity(target: Target, sparsity: float, size: int) -> float:
    """Returns the share of zeros of a weight that may have lost channels.

    An entry for each input or output stays, whichever are more: the few entries that a small weight would keep are not
    enough. Fewer stay only if the weight had fewer when it was measured.

    Args:
        target: The weight.
        sparsity: The share of zeros at which it was measured.
        size: How many entries it had then.
    """
    inputs, outputs = (math.prod(target.shape[axis] for axis in axes) for axes in (target.in_axes, target.out_axes))
    least = min((1 - sparsity) * size, max(inputs, outputs))
    return float(np.clip(1 - least / target.size, 0.0, sparsity))


def _prune(
    subject: SearchedModel, model: Any, levels: Mapping[str, Level], batches: Sequence[Any], memory: float
) -> None:
    """Sets the least important weights to zero and fits the others."""
    if not any(level.sparsity for level in levels.values()):
        return
    targets = [target for target in weights_of(model) if target.name in levels]
    sizes = {name: product.target.size for name, product in subject.products.items()}
    # Arrays of low rank were not measured as weights, and have no zeros.
    shares = [_sparsity(one, levels[one.name].sparsity, sizes.get(one.name, one.size)) for one in targets]
    sparse = [Level(share) for share in shares]
    work = LayerwiseRepair(model, targets, LevelSolver(targets, sparse, subject.grid_of), memory=memory)
    work.run(batches)
    for variable, value in work.values:
        variable.assign(value)
