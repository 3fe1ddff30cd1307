"""Reads CSV files with a header: numeric columns become one matrix, or several inputs by name; text labels, classes."""

import contextlib
import csv
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from prunekit.recipe.datasets.arrays import existing
from prunekit.recipe.datasets.disk import DiskPart
from prunekit.recipe.datasets.fingerprint import fingerprint, fingerprint_notes
from prunekit.recipe.datasets.parts import ArrayPart, Opened, Part
from prunekit.recipe.settings.data_source import TEXT_LAYERS, DataSource
from prunekit.recipe.settings.fields import first_text, is_number, nearest, shortened, shown
from prunekit.recipe.text.loader import RecipeError

# Size of a file from which its numbers are kept in a temporary file, and read from there batch by batch.
IN_MEMORY = 1 << 28
# Values that are parsed at once.
_VALUES = 1 << 18
# Longer values are text.
_LONGEST_NUMBER = 100
# pandas writes the columns of a one-hot encoding so.
_TRUTH = {"true": "1", "false": "0"}
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")


@dataclass(frozen=True)
class UsedColumns:
    """The columns of a file that are used.

    Attributes:
        inputs: Input name -> indices of its columns; the name "" stands for a single input.
        text: Names of the inputs that are text, of one column each.
        labels: Indices of the columns of the label.
        names: Names of all columns.
    """

    inputs: Mapping[str, tuple[int, ...]]
    text: frozenset[str]
    labels: tuple[int, ...]
    names: tuple[str, ...]


@dataclass
class Table:
    """The parsed columns of a file, in pieces of some thousand rows.

    Attributes:
        numbers: Input name -> open file of float32 numbers, row by row.
        words: Input name -> rows of UTF-8 text.
        labels: Pieces of the label's columns, as text.
        rows: Number of rows.
    """

    numbers: dict[str, IO[bytes]] = field(default_factory=dict)
    words: dict[str, list[np.ndarray]] = field(default_factory=dict)
    labels: list[np.ndarray] = field(default_factory=list)
    rows: int = 0


def open_csv(source: DataSource) -> Opened:
    """Returns the rows of a CSV file, and of the file `test` if the recipe names one.

    Raises:
        RecipeError: A file or column is missing, a value is missing or no number, or rows differ in length.
    """
    path = existing(str(source.csv))
    train, names, classes = _part(path, source, None)
    test = None
    if isinstance(source.test, str):
        test, others, found = _part(existing(source.test), source, classes)
        if classes is None and found is not None:
            raise RecipeError(
                f"{source.test} must have labels that are numbers, as {path}. Received: text, such as "
                f"{shown(first_text(found))}."
            )
        if others != names:
            raise RecipeError(f"{source.test} must have the columns of {path}, in the same order: {few(names)}.")
    notes = () if isinstance(train, ArrayPart) else fingerprint_notes([path])
    return Opened(path.name, train, test=test, class_names=tuple(classes or ()), notes=notes)


def _part(path: Path, source: DataSource, classes: list[str] | None) -> tuple[Part, tuple[str, ...], list[str] | None]:
    in_memory = path.stat().st_size < IN_MEMORY
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open(path, newline="", encoding="utf-8-sig"))
        rows = csv.reader(file, delimiter=source.delimiter or ",", strict=True)
        with _readable(path, rows):
            layout = _layout(path, next(rows, []), source)
            table = _parsed(path, rows, layout, opened)
        if not table.rows:
            raise RecipeError(f"{path} has no rows below its header.")
        labels, classes = _labels(path, table, classes)
        arrays: dict[str, Any] = {name: _mapped(name, table, layout) for name in layout.inputs}
    if in_memory:
        arrays = {name: np.array(array) for name, array in arrays.items()}
    inputs = arrays[""] if list(arrays) == [""] else arrays
    if in_memory:
        return ArrayPart(inputs, labels), layout.names, classes
    digest = fingerprint([path], path.parent)
    return DiskPart(inputs, labels, np.arange(table.rows), digest), layout.names, classes


def column_names(path: Path) -> tuple[str, ...]:
    """Returns the names in the header line of a CSV file whose delimiter is a comma.

    Raises:
        RecipeError: The file is not text in UTF-8, or has no header line.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        with _readable(path, rows):
            return _names(path, next(rows, []))


@contextlib.contextmanager
def _readable(path: Path, rows: Any) -> Iterator[None]:
    """Turns errors of the reader `rows` into one line that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start:,}.") from error
    except csv.Error as error:
        raise RecipeError(f"{path} is not a CSV file, near line {rows.line_num}: {error}.") from error


# ---- columns ---------------------------------------------------------------------------------------------------------


def _layout(path: Path, header: Sequence[str], source: DataSource) -> UsedColumns:
    names = _names(path, header)
    if source.inputs is None and "" in names:
        raise RecipeError(
            f"{path}: column {names.index('') + 1} has no name, as the index that pandas writes by default. Leave it "
            "out of the file (index=False), give it a name, or choose the columns with inputs: [...]."
        )
    indices = {name: index for index, name in enumerate(names)}

    def found(wanted: Sequence[str], option: str) -> tuple[int, ...]:
        for name in wanted:
            if name not in indices:
                raise RecipeError(f"data.{option}: {path} has no column {shown(name)}.{_hint(name, names)}")
        return tuple(indices[name] for name in wanted)

    labels = found([source.label] if isinstance(source.label, str) else source.label, "label")
    given = source.inputs
    if given is None:
        given = [name for index, name in enumerate(names) if index not in labels]
    groups = given if isinstance(given, Mapping) else {"": given}
    inputs = {name: found(columns, "inputs") for name, columns in groups.items()}
    for columns in inputs.values():
        if not columns or set(columns) & set(labels):
            raise RecipeError(f"data.inputs: {path} must have columns for the inputs besides those of the label.")
    return UsedColumns(inputs, _text_inputs(source, inputs), labels, names)


def _names(path: Path, header: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the columns from the header line."""
    names = tuple(name.strip() for name in header)
    if not any(names):
        raise RecipeError(f"{path} must begin with a header line of column names. Received: an empty line.")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise RecipeError(f"{path} has two columns {shown(twice)}: give each column its own name.")
    if all(is_number(name) for name in names):
        raise RecipeError(f"{path} must begin with a header line of column names. Received: numbers: {few(names)}.")
    return names


def _hint(name: str, names: Sequence[str]) -> str:
    mark = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    return nearest(name, names) if mark is None else f" The file seems to have another delimiter: delimiter: {mark!r}."


def _text_inputs(source: DataSource, inputs: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    layers = source.preprocessing if isinstance(source.preprocessing, Mapping) else {"": source.preprocessing or []}
    text = frozenset(name for name in inputs if layers.get(name) and next(iter(layers[name][0])) in TEXT_LAYERS)
    for name in text:
        if len(inputs[name]) > 1:
            raise RecipeError(
                f"data.preprocessing: {next(iter(layers[name][0]))} takes one column of text. Received: an input of "
                f"{len(inputs[name])} columns. Give each its own input: inputs: {{NAME: [COLUMN]}}."
            )
    return text


# ---- values ----------------------------------------------------------------------------------------------------------


def _parsed(path: Path, rows: Any, layout: UsedColumns, opened: contextlib.ExitStack) -> Table:
    table = Table()
    for name in layout.inputs:
        if name not in layout.text:
            table.numbers[name] = opened.enter_context(tempfile.TemporaryFile(prefix="prunekit-"))
    for lines, values in _pieces(path, rows, len(layout.names)):
        place = _Place(path, layout.names, lines)
        for name, columns in layout.inputs.items():
            if name in layout.text:
                table.words.setdefault(name, []).append(_text(place, values, columns))
            else:
                table.numbers[name].write(_numbers(place, values, columns).tobytes())
        table.labels.append(_text(place, values, layout.labels))
        table.rows += len(values)
    return table


def _pieces(path: Path, rows: Any, width: int) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yields the line numbers and the values of some rows at a time."""
    most = max(1, _VALUES // width)
    lines: list[int] = []
    values: list[list[str]] = []
    for row in chain(rows, [None]):
        if row:
            if len(row) != width:
                raise RecipeError(
                    f"{path}, line {rows.line_num}: expected {width} values, as in the header. Received: {len(row)}."
                )
            lines.append(rows.line_num)
            values.append(row)
        if values and (row is None or len(values) == most):
            yield lines, values
            lines, values = [], []


@dataclass(frozen=True)
class _Place:
    """Where some rows are, for errors."""

    path: Path
    names: Sequence[str]
    lines: Sequence[int]

    def column(self, row: int, column: int) -> str:
        """Returns the start of an error about one value."""
        return f"{self.path}, line {self.lines[row]}: column {shown(self.names[column])}"

    def refuse_missing(self, row: int, column: int, value: str) -> None:
        """Raises if the value is missing."""
        if value.strip().lower() in _MISSING:
            raise RecipeError(
                f"{self.column(row, column)} has no value. Received: {shown(value)}. Fill it in, or leave out the row "
                "or the column (inputs: [...])."
            )


def _text(place: _Place, values: list[list[str]], columns: Sequence[int]) -> np.ndarray:
    """Returns the columns as Python strings; shape (rows, columns)."""
    found = np.empty((len(values), len(columns)), object)
    for row, cells in enumerate(values):
        for i, column in enumerate(columns):
            place.refuse_missing(row, column, cells[column])
            found[row, i] = cells[column].strip()
    return found


def _numbers(place: _Place, values: list[list[str]], columns: Sequence[int]) -> np.ndarray:
    """Returns the columns as float32, true and false as 1 and 0; shape (rows, columns)."""
    cells = [[row[column] for column in columns] for row in values]
    found = _finite(cells)
    if found is None:
        found = _finite([[_without_truth(cell) for cell in row] for row in cells])
    if found is None:
        raise _refusal(place, values, columns)
    return found


def _finite(cells: list[list[str]]) -> np.ndarray | None:
    """Returns the values as float32; None if one of them is no finite number."""
    # NumPy gives each text the length of the longest.
    if any(len(cell) > _LONGEST_NUMBER for row in cells for cell in row):
        return None
    try:
        with np.errstate(over="ignore"):
            found = np.array(cells, str).astype("float64").astype("float32")
    except ValueError:
        return None
    return found if np.isfinite(found).all() else None


def _without_truth(cell: str) -> str:
    return _TRUTH.get(cell.strip().lower(), cell)


def _refusal(place: _Place, values: list[list[str]], columns: Sequence[int]) -> RecipeError:
    """Returns the error about the first value that is missing, text, or no finite float32 number."""
    for row, cells in enumerate(values):
        for column in columns:
            value = _without_truth(cells[column])
            place.refuse_missing(row, column, value)
            if len(value) > _LONGEST_NUMBER or not is_number(value):
                name = place.names[column]
                return RecipeError(
                    f"{place.column(row, column)} must hold numbers. Received: text, {shown(value)}. Leave the column "
                    f"out with inputs: [...], or give it an input of its own and a layer that reads text: "
                    f"inputs: {{{name}: [{name}], ...}}, preprocessing: {{{name}: [StringLookup]}}."
                )
            if not abs(float(value)) <= float(np.finfo("float32").max):
                return RecipeError(
                    f"{place.column(row, column)} must hold finite numbers that float32 can hold. Received: "
                    f"{shown(value)}."
                )
    return RecipeError(f"{place.path} holds values that are not numbers.")


def _mapped(name: str, table: Table, layout: UsedColumns) -> np.ndarray:
    """Returns an input: a read-only view of its temporary file of shape (rows, columns), or rows of text."""
    if name in layout.text:
        return np.concatenate(table.words[name])
    file = table.numbers[name]
    file.flush()
    # The file has no name: the system removes it with the last view of it, also if the process is killed.
    return np.memmap(file, "float32", "r", shape=(table.rows, len(layout.inputs[name])))


def _labels(path: Path, table: Table, classes: list[str] | None) -> tuple[np.ndarray, list[str] | None]:
    """Returns the labels, and the names of the classes in the order of their numbers, for labels that are text."""
    text = np.concatenate(table.labels)
    if classes is None:
        for kind in ("int64", "float32"):
            try:
                with np.errstate(over="ignore"):
                    found = text.astype(kind)
            except (ValueError, OverflowError):
                continue
            if not np.isfinite(found).all():
                raise RecipeError(f"{path}: labels must be finite. Received: infinity among them.")
            return found[:, 0] if found.shape[1] == 1 else found, None
    if text.shape[1] > 1:
        raise RecipeError(
            f"{path}: several columns of the label must hold numbers. Received: text. Name one column for classes."
        )
    known, numbers = np.unique(text[:, 0], return_inverse=True)
    if classes is None:
        return numbers.astype("int64"), [str(name) for name in known]
    strangers = [str(name) for name in known if name not in classes]
    if strangers:
        raise RecipeError(f"{path} has the label {shown(strangers[0])}, which the training file does not have.")
    return np.array([classes.index(str(name)) for name in known], "int64")[numbers], classes


def few(names: Sequence[str]) -> str:
    """Returns the names in one line, shortened if there are many."""
    return shortened(", ".join(names))
