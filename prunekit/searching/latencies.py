"""Latencies: of a model's layers at several widths, each as a file of its own, and of whole files.

The latency of a layer is taken to be bilinear in the shares of its inputs and outputs that are kept: four files of one
layer, whole and with half of the inputs, of the outputs and of both, determine the four coefficients.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.linear_kinds import CONVOLUTIONS, DEPTHWISE, TRANSPOSED, kind_of
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.anatomy.records.plain_data import Record
from prunekit.delivery.integers.integer_export import integer_file
from prunekit.delivery.integers.integer_io import FloatEndError
from prunekit.delivery.litert.latency import Latencies, input_arrays, measured_latencies, plain_file
from prunekit.delivery.litert.litert import input_specs
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.time_limit import NO_LIMIT, TimeLimit
from prunekit.techniques.factorize.forms import Structure
from prunekit.techniques.factorize.new_model import with_random_factors
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.grids.grids import FEW_BITS
from prunekit.techniques.quantize.options import QuantizationOptions

# Seconds for each file of one layer, of all turns together; and for whole files, or until their share is so exact.
_LAYER_SECONDS, _LEAST_SECONDS, _FILE_SECONDS, _PRECISION = 0.2, 3.0, 6.0, 0.01


@dataclass(frozen=True)
class LayerSeconds(Record):
    """Seconds of a call of one layer: constant + inputs * u + outputs * v + both * u * v, for shares u and v.

    Attributes:
        weight: Name of its weight.
        bits: Bits of an entry of the weight in the file.
        constant: See above.
        inputs: Factor of the share of its inputs that is kept.
        outputs: Factor of the share of its outputs that is kept.
        both: Factor of their product.
        form: Form of the layers of low rank in its place; "" = the layer itself.
        rank: Number of values between these; 0 = the layer itself.
    """

    weight: str
    bits: int
    constant: float
    inputs: float
    outputs: float
    both: float
    form: str = ""
    rank: int = 0


def by_weight(rows: Sequence[LayerSeconds]) -> dict[str, list[LayerSeconds]]:
    """Returns weight -> rows."""
    found: dict[str, list[LayerSeconds]] = {}
    for row in rows:
        found.setdefault(row.weight, []).append(row)
    return found


def seconds_of(rows: Sequence[LayerSeconds], bits: int, structure: Structure | None) -> LayerSeconds:
    """Returns the seconds of a layer at a level; those of a rank lie on a line through the smallest and the largest.

    Args:
        rows: Of the weight.
        bits: Bits of its codes.
        structure: Form and rank; None = the layer itself.
    """
    form, rank = ("", 0) if structure is None else (structure.form, structure.ranks[0])
    found = sorted(
        (row for row in rows if (row.bits, row.form) == (stored_width(bits), form)), key=lambda row: row.rank
    )
    low, high = found[0], found[-1]
    share = 0.0 if low.rank == high.rank else (rank - low.rank) / (high.rank - low.rank)
    parts = {name: (1 - share) * getattr(low, name) + share * getattr(high, name) for name in _PARTS}
    return replace(low, rank=rank, **parts)


_PARTS = ("constant", "inputs", "outputs", "both")


def layer_axes(target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of a weight that number the layer's inputs, and those that number its outputs, each once."""
    if isinstance(target.layer, DEPTHWISE):
        return tuple(target.out_axes[:1] or target.in_axes[:1]), ()
    return tuple(target.in_axes), tuple(axis for axis in target.out_axes if axis not in target.in_axes)


def stored_width(bits: int) -> int:
    """Returns the bits of an entry in a LiteRT file."""
    return FEW_BITS if bits <= FEW_BITS else 8


def layer_latencies(
    subject: SearchedModel,
    bits: Sequence[int],
    progress: Callable[[int, int, str], None],
    structures: Mapping[str, Sequence[Structure]] | None = None,
    limit: TimeLimit = NO_LIMIT,
) -> tuple[list[LayerSeconds], list[str]]:
    """Measures the layer of each weight whose level is chosen, one thread, all files in turns.

    Args:
        subject: The model.
        bits: Bits that a file stores.
        progress: Told of each file: (done, total, text).
        structures: Name of a weight -> forms and ranks in its place that are measured, too.
        limit: When the measurements end. The layers that multiply most come first; the first one is always measured.

    Returns:
        The rows, and the weights that there was no time for.

    Raises:
        ScriptFailed: A file does not run.
    """
    wanted: dict[tuple[str, int, Structure | None], list[tuple[float, float, str]]] = {}
    makers: dict[str, Callable[[], tuple[bytes, dict[str, np.ndarray]]]] = {}
    # A separable convolution has two weights, and is counted with the last one.
    names = {id(product.target.layer): name for name, product in subject.products.items()}
    # A lookup of whole numbers takes next to no time.
    timed = [name for name in names.values() if _products(subject, name)]
    # Number of files after those of each layer.
    ends: dict[str, int] = {}
    for name in sorted(timed, key=lambda name: -_products(subject, name)):
        layer = subject.products[name].target.layer
        for structure, width in itertools.product((None, *(structures or {}).get(name, ())), bits):
            for corner in _corners(layer, structure):
                one = _OneLayer(layer, subject.shapes[id(layer)].inputs, width, *corner, structure)
                makers.setdefault(one.key, one.file)
                wanted.setdefault((name, width, structure), []).append((*one.shares, one.key))
        ends[name] = len(makers)
    numbers = {key: number for number, key in enumerate(makers)}
    with tempfile.TemporaryDirectory() as folder:
        paths, arrays = [], []
        for number, make in enumerate(makers.values()):
            if number >= min(ends.values()) and limit.left < _LAYER_SECONDS * number:
                break
            content, given = make()
            paths.append(Path(folder, f"{number}.tflite"))
            paths[-1].write_bytes(content)
            arrays.append(given)
            progress(number + 1, len(makers), "a file of one layer")
        found = measured_latencies(paths, arrays, max(_LEAST_SECONDS, _LAYER_SECONDS * len(paths)))
    late = [name for name in timed if ends[name] > len(paths)]
    rows = []
    for (name, width, structure), corners in wanted.items():
        if name in late:
            continue
        points = [(u, v, found.seconds(numbers[key])) for u, v, key in corners]
        rows.append(_row(subject, name, width, structure, points))
    return rows, late


def _row(
    subject: SearchedModel,
    name: str,
    width: int,
    structure: Structure | None,
    points: Sequence[tuple[float, float, float]],
) -> LayerSeconds:
    """Returns the row of a weight, from (share of inputs, share of outputs, seconds) of its files."""
    parts = _bilinear(points)
    if structure is None:
        return LayerSeconds(name, width, *parts)
    if len(points) == 1:
        # One of the two layers has the inputs, the other one the outputs.
        first, second = (math.prod(shape) for shape in subject.layouts[name].shapes(structure))
        parts = 0.0, points[0][2] * first / (first + second), points[0][2] * second / (first + second), 0.0
    return LayerSeconds(name, width, *parts, structure.form, structure.ranks[0])


def _products(subject: SearchedModel, name: str) -> float:
    """Returns how many products a layer that can be timed by itself computes for an example; 0 for another one."""
    target = subject.products[name].target
    shapes = subject.shapes.get(id(target.layer))
    return shapes.positions(target) * target.size if shapes is not None and shapes.reads_floats else 0.0


def _corners(layer: Any, structure: Structure | None) -> list[tuple[bool, bool]]:
    """Returns (whether inputs are halved, whether outputs are) of the files of a layer."""
    if structure is not None and _width(layer) is not None:
        # One layer reads the inputs, another one computes the outputs.
        return [(False, False), (True, False), (False, True)]
    if isinstance(layer, DEPTHWISE):
        return [(False, False), (True, False)]
    if _width(layer) is None or getattr(layer, "groups", 1) != 1:
        return [(False, False)]
    return [(half_in, half_out) for half_in in (False, True) for half_out in (False, True)]


def _width(layer: Any) -> str | None:
    """Returns the name of the setting that says how many outputs a layer has; None for another kind of layer."""
    kind = kind_of(layer)
    return "filters" if kind in (*CONVOLUTIONS, *TRANSPOSED) else "units" if kind is keras.layers.Dense else None


class _OneLayer:
    """A model of one layer, whole or with half of its inputs or outputs, or of those of low rank in its place."""

    def __init__(  # noqa: PLR0913
        self,
        layer: Any,
        shape: tuple[int, ...],
        bits: int,
        half_in: bool,
        half_out: bool,
        structure: Structure | None = None,
    ):
        self._kind, self._bits, self._structure = type(layer), bits, structure
        self._config = {**layer.get_config(), "dtype": "float32"}
        if self._config.get("activation") == "softmax":
            # Keras warns of one that is over a single value, as half of two.
            self._config["activation"] = "linear"
        inputs = max(shape[-1] // 2, 1) if half_in else shape[-1]
        self._shape = (*shape[:-1], inputs)
        outputs = 1.0
        if half_out:
            width = str(_width(layer))
            whole, self._config[width] = self._config[width], max(self._config[width] // 2, 1)
            outputs = self._config[width] / whole
        self.shares = inputs / shape[-1], outputs
        told = {name: value for name, value in self._config.items() if name != "name" and "initializer" not in name}
        self.key = json.dumps([self._kind.__name__, told, self._shape, bits, structure], default=str, sort_keys=True)

    def file(self) -> tuple[bytes, dict[str, np.ndarray]]:
        """Returns the file, which reads and writes integers, and inputs of one call."""
        inputs = keras.Input(self._shape)
        model = keras.Model(inputs, self._kind.from_config(self._config)(inputs))
        if self._structure is not None:
            targets = find_targets(model)[0]
            model = with_random_factors(model, targets, {one.name: self._structure for one in targets})
        samples = np.random.default_rng(0).normal(size=(2, *self._shape)).astype("float32")
        options = QuantizationOptions(self._bits, method="nearest", weight_ranges="minmax", activation_ranges="minmax")
        state = quantize_model(model, options, samples)
        with tempfile.TemporaryDirectory() as folder:
            write = functools.partial(
                integer_file,
                state.placement,
                state.ranges,
                state.formats,
                structure=samples,
                specs=input_specs(model, samples),
                folder=Path(folder),
            )
            try:
                made = write(integer_io=("inputs", "outputs"))
            except FloatEndError:
                # Activations without an integer kernel.
                made = write()
        return made.content, input_arrays(model, samples)


def _bilinear(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """Returns (constant, inputs, outputs, both) of points (u, v, seconds); of one point, all of it in `both`.

    Of three points, `both` is 0.
    """
    if len(points) == 1:
        return 0.0, 0.0, 0.0, points[0][2]
    u, v, seconds = (np.array(column) for column in zip(*points, strict=True))
    columns = [np.ones_like(u), u, v, u * v]
    known = [len(set(u)) > 1, len(set(v)) > 1]
    used = [True, known[0], known[1], all(known) and len(points) > 3]
    matrix = np.stack([column * use for column, use in zip(columns, used, strict=True)], axis=1)
    # The least solution: what is not used stays 0.
    constant, inputs, outputs, both = map(float, np.linalg.lstsq(matrix, seconds, rcond=None)[0])
    return constant, inputs, outputs, both


class FileClock:
    """Measures calls of files in turns with the model's file in float32.

    Args:
        model: The model.
        inputs: Some of its inputs.

    Attributes:
        whole: Seconds of a call of the file in float32.
    """

    def __init__(self, model: Any, inputs: Any):
        self._inputs, self._file = input_arrays(model, inputs), plain_file(model, inputs)
        self.whole = self._measured(self._file).seconds(0)

    def seconds(self, content: bytes) -> float:
        """Returns the seconds of a call: those of the file in float32, times the share of both in the same turns."""
        return self.whole * self._measured(self._file, content).share(1)[0]

    def _measured(self, *files: bytes) -> Latencies:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"{number}.tflite") for number in range(len(files))]
            for path, content in zip(paths, files, strict=True):
                path.write_bytes(content)
            return measured_latencies(paths, [self._inputs] * len(files), _FILE_SECONDS, _PRECISION)
