"""quantize: puts a trained model on integer grids, and writes its integer file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import keras
import numpy as np

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.data.calibration import CheckedData, check_inputs, without_labels
from prunekit.core.data.synthetic_inputs import comparison_inputs
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.runtime.arguments import writable_file
from prunekit.core.runtime.variable_values import weights_digest
from prunekit.delivery.integers.integer_io import INTEGER_IO, UINT8
from prunekit.delivery.integers.integer_report import IntegerExport
from prunekit.delivery.integers.integer_writing import ENCODED, EXAMPLES, KnownOutputs, export_integers
from prunekit.delivery.integers.keras_integers import export_keras_integers
from prunekit.delivery.litert.export_reference import ReferenceModel
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions, number_of_bytes
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import FORMER, QuantizationKeywords, QuantizationOptions
from prunekit.techniques.quantize.placement.text_inputs import reads_texts, text_readers
from prunekit.techniques.quantize.preparation import check_dilations
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.techniques.quantize.training.fit_watch import remember, warn_after_fit


class QuantizationResult(QuantizationReport):
    """The report of a quantized model, which also simulates its integers and writes its integer file.

    Attributes:
        model: The model; its weights were changed in place.
        state: Placement and grids.
    """

    state: ClassVar[QuantizationState]
    _samples: ClassVar[Any]
    _known: ClassVar[KnownOutputs]
    _digest: ClassVar[str | None]

    def __init__(self, state: QuantizationState, samples: Any, known: KnownOutputs):
        super().__init__(**vars(state.report))
        # The simulation computes the known outputs as long as no bias and no statistic changes, either.
        digest = None if known.simulation is None else weights_digest(state.model)
        vars(self).update(state=state, _samples=samples, _known=known, _digest=digest)
        remember(state)

    @property
    def model(self) -> Any:
        return self.state.model

    @contextlib.contextmanager
    def simulating(self) -> Iterator[Any]:
        """Inside this context the model computes as the integer file will; yields the model.

        `predict`, `evaluate`, `fit` and eager calls run the simulation on every backend. Functions of your own that
        were traced before have to be traced again inside.

        Raises:
            ValueError: The weights were changed since.
        """
        self.state.check_unchanged()
        with self.state.simulating() as model:
            yield model

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        data: Any = None,
        integer_io: Sequence[str] | str = (),
        sparse: bool = False,
    ) -> IntegerExport:
        """Writes the model as a file with the grids of this quantization, and returns how the file compares.

        The file is run before it is kept. In a LiteRT file each tensor must be at most one step of its grid from the
        simulation, or the few steps that kernels of 16 bits are known to be off. A Keras file has the weights of Dense,
        EinsumDense and Embedding layers in int8, computes in floating point as the model with weights on grids, and
        loads without prunekit.

        Args:
            path: Name of the file, which ends with ".tflite" or ".keras". An existing file is replaced.
            data: Examples that the file is compared on, as `pk.export` takes them; None = some of the calibration data,
                or random numbers without these.
            integer_io: "inputs", "outputs" or both: these are int8 or int16 in the LiteRT file, with scale and zero
                point of their grids, instead of float32, as microcontrollers want them. "uint8": both are uint8, as
                cameras deliver pixels; ("inputs", "uint8"): these alone are.
            sparse: True encodes the kernels of a LiteRT file sparsely where that is smaller. The interpreter restores
                them when it loads the file; LiteRT for Microcontrollers cannot.

        Raises:
            ValueError: The name has another ending; there are no data, and no random inputs can be made; the weights
                were changed since; an input or output that is to be integers is read or computed in floating point; a
                file without integer kernels is to be encoded sparsely.
            IntegerExportError: The model cannot be converted on this backend, Keras has none of its layers in int8, or
                the file computes something else. No file is written then.
        """
        target = Path(path)
        if target.suffix not in (".tflite", ".keras"):
            raise ValueError(
                'An integer file is a LiteRT file, "NAME.tflite", or a Keras file, "NAME.keras". '
                f"Received: {str(path)!r}."
            )
        writable_file(path)
        if not isinstance(sparse, bool):
            raise ValueError(f"`sparse` is True or False. Received: {sparse!r}.")
        is_litert = target.suffix == ".tflite"
        if is_litert:
            _check_texts(self.model)
        self.state.check_unchanged()
        if data is not None:
            data = without_labels(self.model, data)
            check_inputs(self.model, data)
        given = self._samples if data is None else data
        if given is None:
            given = comparison_inputs(self.model)
        known = self._known if data is None else KnownOutputs()
        if known.simulation is not None and weights_digest(self.model) != self._digest:
            known = replace(known, simulation=None)
        kinds = _integer_io(integer_io, self.state, is_litert)
        if sparse and not is_litert:
            raise ValueError(f"{ENCODED} Received: sparse=True for a Keras file.")
        if is_litert:
            made = export_integers(self.state, given, target, known, integer_io=kinds, sparse=sparse)[0]
        else:
            made = export_keras_integers(self.state, given, target, known.float_model)
        # The comparison is on the same data.
        return replace(made, notes=(*self.state.data_problems, *made.notes))


def _check_texts(model: Any) -> None:
    """Refuses a model that reads texts, whose lookup no LiteRT file has; the error has the code that leaves it out."""
    if not reads_texts(model):
        return
    readers = text_readers(model)
    name = readers[0] if readers else "NAME"
    raise ValueError(
        f"A LiteRT file reads numbers. Received: the model {model.name!r}, in which {', '.join(readers) or 'a layer'} "
        "reads texts. Quantize the part behind it, on its outputs: "
        f"pk.quantize(keras.Model(model.get_layer({name!r}).output, model.outputs), model.get_layer({name!r})(texts))."
    )


def _integer_io(given: Sequence[str] | str, state: QuantizationState, is_litert: bool) -> tuple[str, ...]:
    listed = (given,) if isinstance(given, str) else given
    kinds = tuple(listed) if isinstance(listed, Sequence) else None
    if kinds is None or not all(one in INTEGER_IO for one in kinds):
        raise ValueError(f'`integer_io` lists "inputs", "outputs", or both, and "uint8". Received: {given!r}.')
    if kinds and (state.formats.activations is None or not is_litert):
        raise ValueError(
            "A file with activations in floating point, as each Keras file is, has inputs and outputs in floating "
            f"point. Received: integer_io={given!r}."
        )
    if UINT8 in kinds and state.formats.activations is not None and state.formats.activations.bits != 8:
        raise ValueError(
            f"Inputs and outputs of uint8 are those of files with activation_bits=8. Received: integer_io={given!r} "
            f"and activation_bits={state.formats.activations.bits}."
        )
    return kinds


@keyword_options(QuantizationOptions, QuantizationKeywords, FORMER)
def quantize(
    model: Any,
    data: Any = None,
    *,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[QuantizationKeywords],
) -> QuantizationResult:
    """Puts the weights of a trained model on integer grids, in place, and chooses the grids of its tensors from data.

    The model stays a Keras model that loads without prunekit: each weight has the value that an integer stands for.
    Entries that are zero stay zero. An interruption or an error leaves the model as it was.

    Args:
        model: A built Keras model.
        data: Calibration data: inputs, a pair (inputs, labels), or a dataset or list of such batches; some hundred
            examples of the training data. Needed unless activation_bits="float"; weights of fewer than 8 bits are then
            rounded on synthetic inputs (random signals), which lose more than data, and far less than the nearest
            values.
        memory: Largest number of bytes of activations that are kept between layers while weights are rounded on data;
            with less, those of wide layers are computed again, which takes time and changes no result.
        progress: Told of each weight that is rounded on data: (done, total, name).
        **options: `bits` (8, or bits by patterns), `activation_bits` (8, 16 or "float"), `group_size`, `method`
            ("auto", "nearest", "gptq", "awq"), `weight_ranges`, `activation_ranges`, `correct_biases`, `equalize`,
            `damping`, `sparsity`, `pattern`, `include`, `exclude`, `misfits`, `full_integer`: see
            `pk.QuantizationOptions`.

    Returns:
        The report, a `QuantizationResult`, with `.simulating()` and `.export(path)`.

    Raises:
        ValueError: An option has a wrong value; data are missing or not finite; a pattern matches nothing.
        TypeError: `model` is not a Keras 3 model; an option is unknown.

    Source: Jacob et al. 2018, arXiv:1712.05877 (integer arithmetic); Frantar et al. 2022, arXiv:2210.17323 (GPTQ);
        Lin et al. 2023, arXiv:2306.00978 (AWQ).
    """
    check_functions(progress=progress)
    chosen, memory = QuantizationOptions(**options), number_of_bytes("memory", memory)
    chosen.with_data(data)
    check_built(model)
    if data is None:
        found = quantize_model(model, chosen, progress=progress, memory=memory)
        warn_after_fit(found)
        return QuantizationResult(found, None, KnownOutputs())
    # Before the model runs: not every CPU has kernels for what is refused.
    check_dilations(model, chosen)
    baseline = Baseline(model, CheckedData(model, data))
    samples = first_examples(inputs for inputs, _, _ in baseline.batches)
    found = quantize_model(model, chosen, data, progress, memory).with_damage(baseline)
    warn_after_fit(found)
    for problem in found.data_problems:
        warnings.warn(problem, stacklevel=3)
    return QuantizationResult(found, samples, KnownOutputs(*map(_first_outputs, (baseline.outputs, baseline.changed))))


def first_examples(batches: Iterable[Any]) -> Any:
    """Returns some examples of batches of inputs or outputs, as NumPy arrays in their structure."""
    found: list[Any] = []
    for inputs in batches:
        found.append(keras.tree.map_structure(lambda one: np.asarray(keras.ops.convert_to_numpy(one)), inputs))
        if sum(len(keras.tree.flatten(one)[0]) for one in found) >= EXAMPLES:
            break
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts)[:EXAMPLES], *found)


def _first_outputs(batches: Iterable[Any]) -> list[np.ndarray]:
    return [one.astype("float32") for one in keras.tree.flatten(first_examples(batches))]


def outputs_of(model: Any, samples: Any) -> list[np.ndarray]:
    """Returns all outputs of a model for all samples, as float arrays."""
    with contextlib.ExitStack() as scratch:
        return ReferenceModel(model, samples, None, None, scratch).answers(model)
