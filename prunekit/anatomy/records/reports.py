"""Reports on a model's weights, as plain data. Does not import Keras: reading a report must not need Keras."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Figure, Record
from prunekit.anatomy.records.sections import Column, Section
from prunekit.anatomy.records.tables import aligned, at_least, known_sum, plain, table


@dataclass(frozen=True)
class Skipped:
    """A weight or layer that is not pruned, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class WeightRow(Record):
    """One weight variable of a model.

    Attributes:
        name: Readable path, such as "block/conv_1/kernel"; unique in the model.
        layer: Readable path of its layer; "" for a weight of the model itself.
        role: "kernel", "recurrent_kernel", "embedding", "depthwise_kernel", "bias", "normalization", "other", or
            "unknown" for a weight of a custom layer.
        shape: Shape of the variable.
        size: Number of weights.
        zeros: Number of weights that are exactly zero.
        pattern: Pattern of the zeros: "dense", "unstructured", "2:4", "block 4x1", "channel" ...
        macs: Multiply-accumulates of these weights for one example, forward; None if unknown, with an entry in the
            notes of the report.
        sparse_macs: The multiply-accumulates whose weight is not zero; None if unknown.
        bytes: Bytes in memory and in a file that stores zeros like other values.
    """

    derived: ClassVar = ("sparsity",)

    name: str
    layer: str
    role: str
    shape: tuple[int, ...]
    size: int
    zeros: int
    pattern: str
    macs: int | None
    sparse_macs: int | None
    bytes: int

    @property
    def sparsity(self) -> float:
        """Fraction of zeros, in [0, 1]; 0.0 for a variable without weights."""
        return self.zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class Event:
    """One mask update: the requested and the reached sparsity at a step."""

    step: int
    asked: float
    reached: float


@dataclass(frozen=True)
class Choice:
    """What an operation took for an option that was "auto".

    Attributes:
        option: Name of the option.
        value: Its value; passed by name it makes the same result.
        reason: Why, as a clause.
    """

    option: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.option}: {self.value}, {self.reason}"


@dataclass(frozen=True)
class LayerError:
    """How far the outputs of a layer moved when the model was pruned with calibration data.

    Attributes:
        name: Name of the layer's weight.
        error: Squared L2 norm of the change of the layer's outputs before the activation, over the calibration data,
            divided by that of the outputs before pruning. Changes of the layers before it are included.
    """

    name: str
    error: Figure


def choices_sections(choices: Sequence[Choice]) -> list[Section]:
    """Returns the table of what was taken for "auto"; [] without any."""
    columns = (Column("Option", "name"), Column("Value", "name"), Column("Reason", "text"))
    rows = tuple((choice.option, choice.value, choice.reason) for choice in choices)
    return [Section("Chosen for auto", columns, rows)] if rows else []


def skipped_section(title: str, place: str, skipped: Sequence[Skipped], notes: Sequence[str] = ()) -> Section:
    """Returns the table of what an operation left as it is, with reasons; `place` is the title of the names' column."""
    rows = tuple((one.name, one.reason) for one in skipped)
    return Section(title, (Column(place, "name"), Column("Reason", "text")), rows, notes=tuple(notes))


def layer_error_section(errors: Sequence[LayerError]) -> Section:
    """Returns the table of the output errors of pruned layers."""
    return Section(
        "Output errors",
        (Column("Weight", "name"), Column("Output error", "fraction")),
        tuple((row.name, row.error) for row in errors),
        explanation="Squared change of the layer's outputs on the calibration data, relative to the squared outputs.",
    )


@dataclass(frozen=True)
class SparsityReport(Displayed):
    """The weights of a model, and the changes that an operation made to them.

    Attributes:
        model_name: Name of the model.
        weights: Every weight variable, each once, in the order of the model's layers.
        skipped: Weights that the operation skipped, with reasons.
        events: Mask updates of the operation.
        notes: Remarks that a reader needs to interpret the figures.
        before: The report from before the operation.
        targets: Names of the weights that the operation pruned.
        layer_errors: Output errors of the pruned layers, in the order of their calls; empty without calibration data.
        choices: Options that were "auto".
        damage: What the operation did to metrics and outputs on its data; None without data.
    """

    derived: ClassVar = (
        "parameters",
        "zeros",
        "sparsity",
        "target_sparsity",
        "bytes",
        "macs",
        "sparse_macs",
        "macs_complete",
    )
    main_items: ClassVar = "weights"
    makes: ClassVar = "prunekit.delivery.reports.model_sections:model_sections"

    model_name: str
    weights: tuple[WeightRow, ...]
    skipped: tuple[Skipped, ...] = ()
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    before: SparsityReport | None = None
    targets: tuple[str, ...] = ()
    layer_errors: tuple[LayerError, ...] = ()
    choices: tuple[Choice, ...] = ()
    damage: Damage | None = None

    @property
    def parameters(self) -> int:
        """Number of weights, including weights that are not trained."""
        return sum(row.size for row in self.weights)

    @property
    def zeros(self) -> int:
        """Number of weights that are exactly zero."""
        return sum(row.zeros for row in self.weights)

    @property
    def sparsity(self) -> float:
        """Fraction of zeros over all weights of the model."""
        return self.zeros / self.parameters if self.parameters else 0.0

    @property
    def target_sparsity(self) -> float:
        """Fraction of zeros over the weights in `targets`; 0.0 without targets."""
        rows = [row for row in self.weights if row.name in self.targets]
        size = sum(row.size for row in rows)
        return sum(row.zeros for row in rows) / size if size else 0.0

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates of all weights for one example, forward; `pk.cost` adds products between activations.

        The sum of the known figures, which is a lower bound unless `macs_complete`; None if no figure is known.
        """
        return known_sum(row.macs for row in self.weights)

    @property
    def sparse_macs(self) -> int | None:
        """The multiply-accumulates in `macs` whose weight is not zero; None if `macs` is None."""
        return None if self.macs is None else sum(row.sparse_macs or 0 for row in self.weights)

    @property
    def macs_complete(self) -> bool:
        """True if the multiply-accumulates of every weight are known."""
        return all(row.macs is not None for row in self.weights)

    @property
    def bytes(self) -> int:
        """Bytes of all weights, zeros stored like other values."""
        return sum(row.bytes for row in self.weights)

    def verdict(self) -> str:
        """Returns one sentence: zeros of the model, sparsity of the pruned weights."""
        text = f"{self.zeros:,} of {self.parameters:,} weights are zero (sparsity {self.sparsity:.3f})"
        count = len(self.targets)
        matrices = f"{count} pruned weight{' matrix' if count == 1 else ' matrices'}"
        return f"{text}; sparsity {self.target_sparsity:.3f} in {matrices}." if count else f"{text}."

    def __str__(self) -> str:
        """Returns a table of the weights as plain text, with totals, skipped weights and notes."""
        head = ("weight", "shape", "zeros", "of", "sparsity", "pattern", "MACs", "sparse MACs", "bytes")
        rows = [_cells(row, marked=row.name in self.targets) for row in self.weights]
        macs = (at_least(total, self.macs_complete) for total in (self.macs, self.sparse_macs))
        total = ("total", "", self.zeros, self.parameters, self.sparsity, "", *macs, self.bytes)
        lines = [f"Model {self.model_name!r}", *table(head, rows, tuple(map(plain, total)), left={0, 1, 5})]
        if self.targets:
            lines.append(f"* pruned: {len(self.targets)} weights, sparsity {self.target_sparsity:.4f} in them")
        if self.before is not None:
            lines.append(f"before: {self.before.zeros:,} zeros, sparsity {self.before.sparsity:.4f}")
        if self.layer_errors:
            rows = [(row.name, f"{row.error:.2%}") for row in self.layer_errors]
            lines += ["", *aligned([("pruned weight", "output error"), *rows], left={0})]
        lines += [f"skipped: {line}" for line in by_reason(self.skipped)]
        lines += map(str, self.choices)
        if self.damage is not None:
            lines.append(f"on {self.damage.examples:,} examples of the data: {self.damage}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cells(row: WeightRow, *, marked: bool) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    figures = (row.zeros, row.size, row.sparsity, row.pattern, row.macs, row.sparse_macs, row.bytes)
    return (row.name + (" *" if marked else ""), shape, *map(plain, figures))


def by_reason(skipped: Sequence[Skipped]) -> list[str]:
    """Returns one line per reason, since large models have many weights that are skipped for the same reason."""
    counts = Counter(item.reason for item in skipped)
    lines = []
    for reason, count in counts.items():
        names = [item.name for item in skipped if item.reason == reason]
        more = f" and {count - 3} more" if count > 3 else ""
        lines.append(f"{', '.join(names[:3])}{more}: {reason}")
    return lines
