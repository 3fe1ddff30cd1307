"""The report of an integer file: its size, its differences from simulation and float model, its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Column, Section
from prunekit.delivery.integers.integer_comparison import TensorDifference
from prunekit.delivery.integers.integer_sparsity import KernelEncoding
from prunekit.delivery.litert.isolated_run import Comparison


class IntegerExportError(RuntimeError):
    """The model cannot be written as an integer file, or the file does not compute what the simulation does."""


@dataclass(frozen=True)
class IntegerExport(Displayed):
    """A written integer file, and how it compares.

    Attributes:
        path: The file.
        bytes: Its size.
        gzip_bytes: Its size after `gzip -9`.
        float_bytes: Size of the model's float32 file; of models whose weights have 1 MiB or more, that of the weights
            if the integer file is smaller.
        skipped: Layers of a LiteRT file that compute in floating point, with the kinds of their operations; of a Keras
            file, weights on grids that it has in floating point, and layers with a copy of a weight, with reasons.
        tensors: Differences of its tensors from the simulation, in steps; empty with activations in floating point.
        simulation: Differences of its outputs from those of the simulation; of a Keras file, whose tensors are in
            floating point, from those of the model with weights on grids.
        float_model: Differences of its outputs from those of the model before its quantization; None where these are
            not known, because there were no calibration data.
        notes: Remarks.
        int8_layers: Names of the layers of a Keras file that Keras has in int8; empty for a LiteRT file.
        int4_layers: Likewise in int4, with scales of groups.
        kernels: How each kernel is stored in a file that was to be encoded sparsely; empty for others.
    """

    derived: ClassVar = ("largest_difference",)
    main_items: ClassVar = "tensors"

    path: str
    bytes: int
    gzip_bytes: int
    float_bytes: int
    skipped: tuple[Skipped, ...]
    tensors: tuple[TensorDifference, ...]
    simulation: Comparison
    float_model: Comparison | None
    notes: tuple[str, ...] = ()
    int8_layers: tuple[str, ...] = ()
    int4_layers: tuple[str, ...] = ()
    kernels: tuple[KernelEncoding, ...] = ()

    @property
    def largest_difference(self) -> int:
        """Largest difference of a tensor from the simulation, in steps of its grid."""
        return max((one.largest or 0 for one in self.tensors), default=0)

    def verdict(self) -> str:
        """Returns one sentence: size, differences, and what is in floating point."""
        text = f"{self.path}: {self.bytes:,} bytes ({self.bytes / self.float_bytes:.3f} of the float32 file)"
        if self.tensors:
            steps = f"{self.largest_difference} {'step' if self.largest_difference == 1 else 'steps'}"
            text += f", {len(self.tensors)} tensors at most {steps} from the simulation"
        if self.kernels:
            sparse = sum(not one.reason for one in self.kernels)
            text += f", {sparse} of {len(self.kernels)} kernels encoded sparsely"
        left, kinds = len(self.skipped), {"int8": len(self.int8_layers), "int4": len(self.int4_layers)}
        if any(kinds.values()):
            told = [f"{n} {'layer has' if n == 1 else 'layers have'} {kind} weights" for kind, n in kinds.items() if n]
            text += f"; {', '.join(told)}"
            return f"{text}, {left} {'weight is' if left == 1 else 'weights are'} in floating point."
        return f"{text}; {left} {'operation computes' if left == 1 else 'operations compute'} in floating point."

    def sections(self) -> tuple[Section, ...]:
        """Returns the export as sections: the file, its tensors, and how its kernels are stored."""
        tensors = [_tensors_section(self.tensors)] if self.tensors else []
        return (_file_section(self), *tensors, *([_kernels_section(self.kernels)] if self.kernels else []))

    def __str__(self) -> str:
        lines = [self.verdict(), *(f"  in floating point: {one.name}: {one.reason}" for one in self.skipped)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _file_section(export: IntegerExport) -> Section:
    columns = (
        Column("File", "name"),
        Column("Bytes", "bytes"),
        Column("gzip", "bytes", keep=5),
        Column("Float32 file", "bytes", keep=5),
        Column("Largest", "number", group="From the simulation", keep=4),
        Column("Mean", "number", group="From the simulation"),
        Column("Mean", "number", group="From the float model"),
        Column("Same class", "fraction", keep=4),
    )
    before = export.float_model
    row = (
        Path(export.path).name,
        export.bytes,
        export.gzip_bytes,
        export.float_bytes,
        export.simulation.max_error,
        export.simulation.mean_error,
        None if before is None else before.mean_error,
        None if before is None else before.agreement,
    )
    return Section(
        "Integer file",
        columns,
        (row,),
        explanation="Differences of the outputs, as fractions of their range: the largest one, and the root of the "
        "mean square. Same class: share of the examples with the most likely class of the float model.",
        notes=(*(f"In floating point: {one.name}: {one.reason}." for one in export.skipped), *export.notes),
    )


def _tensors_section(tensors: tuple[TensorDifference, ...]) -> Section:
    columns = (
        Column("Tensor of", "name"),
        Column("Largest difference", "count"),
        Column("Codes that differ", "fraction"),
    )
    rows = tuple((one.name, one.largest, one.share) for one in tensors)
    return Section(
        "Tensors of the file and of the simulation",
        columns,
        rows,
        explanation="In steps of the tensor's grid, for one example. The simulation continues after each tensor with "
        "the values of the file.",
        shown="page",
    )


def _kernels_section(kernels: tuple[KernelEncoding, ...]) -> Section:
    columns = (
        Column("Kernel of", "name"),
        Column("Zeros", "fraction"),
        Column("Dense", "bytes", group="Bytes"),
        Column("Sparse", "bytes", group="Bytes"),
        Column("Stored", "label"),
    )
    rows = tuple(
        (one.name, one.zeros, one.dense, one.sparse, f"densely: {one.reason}" if one.reason else "sparsely")
        for one in kernels
    )
    return Section(
        "Kernels of the file",
        columns,
        rows,
        explanation="Sparse: the codes that are not zero, their indices, and what the file needs to restore the kernel "
        "when it is loaded.",
    )
