"""A section of a report as plain data: title, table, notes and pictures. The terminal, the page and JSON share it.

Does not import Keras, NumPy or matplotlib: every technique can make sections, and reading a report needs none of them.
`delivery/reports/formatting.py` has one formatter for each kind of column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias, TypeVar

from prunekit.anatomy.records.display import Displayed, data_frame
from prunekit.anatomy.records.plain_data import from_plain
from prunekit.sparsity.arguments import whole

Item = TypeVar("Item")
Value: TypeAlias = bool | int | float | str | tuple[str | int, ...] | None

# Kind of a column -> True if the cells are figures, which are aligned to the right and never broken.
KINDS = {
    "label": False,  # a few words
    "text": False,  # sentences
    "name": False,  # the name of a weight, a layer or a file
    "names": False,  # several names, as a list
    "code": False,  # a hash, a path
    "status": False,  # "ok", "met", "refused", "failed", "not met", or another word
    "shape": False,  # the shape of a weight, as a list of whole numbers
    "count": True,  # a whole number, with all digits
    "short_count": True,  # a large whole number, with three digits: 1.18 M
    "number": True,  # a measured figure, with `digits` significant digits
    "fraction": True,  # an accuracy or another fraction, with four decimals
    "sparsity": True,  # a fraction of zeros; the page adds a bar
    "bytes": True,
    "seconds": True,
    "latency": True,  # the duration of one call, in seconds
}
SHOWN = ("always", "page", "folded")
# Most rows of a picture with one row for each layer: it stays readable, and the table has the others.
MOST_BARS = 60


@dataclass(frozen=True)
class Column:
    """A column of a section's table.

    Attributes:
        name: Heading of the column.
        kind: Kind of the values, one of `KINDS`. A text in a column of figures is shown as it is.
        group: First part of the heading, which neighbouring columns share: "Zeros" of "before" and "after".
        under: Heading of another column. The page shows this column's value as a second line of that column's cell.
        keep: Priority. A narrow terminal drops the columns with the lowest number first; 9 is never dropped.
        digits: Significant digits, for the kind "number".
    """

    name: str
    kind: str = "label"
    _: KW_ONLY
    group: str = ""
    under: str = ""
    keep: int = 9
    digits: int = 4

    def __post_init__(self) -> None:
        """Checks the fields."""
        _require_texts(self, "name", "kind", "group", "under")
        if self.kind not in KINDS:
            raise ValueError(f"A column's kind is one of {', '.join(KINDS)}. Received: {self.kind!r}.")
        for name in ("keep", "digits"):
            whole(name, getattr(self, name), 0, largest=17)

    @property
    def heading(self) -> str:
        """Group and name: "Zeros before"."""
        return f"{self.group} {self.name}".strip()

    @property
    def numeric(self) -> bool:
        """True if the cells are figures."""
        return KINDS[self.kind]


@dataclass(frozen=True)
class Picture:
    """A picture by reference: the name of a plot and its data. Only the page draws it.

    Attributes:
        title: Heading of the picture.
        caption: Text below the heading.
        label: Text alternative for readers who cannot see the picture.
        plot: Name of a plot in `delivery.pages.pictures.PLOTS`.
        data: What the plot draws, as JSON values.
        wide: True for a picture that takes half the page, False for a quarter.
    """

    title: str
    caption: str
    label: str
    plot: str
    data: Mapping[str, Any]
    wide: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        _require_texts(self, "title", "caption", "label", "plot")
        if not isinstance(self.data, Mapping):
            raise TypeError(f"A picture's data is a mapping. Received: {type(self.data).__name__}.")


def largest_by(items: Sequence[Item], size: Callable[[Item], float], most: int = MOST_BARS) -> list[Item]:
    """Returns the `most` items with the largest `size`, in their original order; of equal ones the first."""
    chosen = sorted(range(len(items)), key=lambda index: (-size(items[index]), index))[:most]
    return [items[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class Section(Displayed):
    """A section of a report: a table with notes and pictures, which every form of the report renders.

    Attributes:
        title: Heading of the section.
        columns: Columns of the table; empty for a section without a table.
        rows: Values of each row, in the order of `columns`; None and nan are unknown values.
        total: Values of a last row; empty for a table without one.
        explanation: How to read the table. The page shows it, the terminal does not.
        notes: Remarks on the values, or the reason why there are no rows.
        pictures: Pictures of the values.
        text: Preformatted text, such as a recipe.
        parts: Sections below this one; a part has no parts.
        shown: "always"; "page": the terminal leaves it out; "folded": likewise, and the page shows it on a click.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()
    total: tuple[Value, ...] = ()
    _: KW_ONLY
    explanation: str = ""
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    text: str = ""
    parts: tuple[Section, ...] = ()
    shown: str = "always"

    def __post_init__(self) -> None:
        """Converts lists to tuples, and checks the fields."""
        for name in ("columns", "notes", "pictures", "parts"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
        rows = tuple(_values("row", row) for row in _items("rows", self.rows))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "total", _values("total", self.total))
        _require_texts(self, "title", "explanation", "text", "shown")
        for name, kind in (("columns", Column), ("notes", str), ("pictures", Picture), ("parts", Section)):
            wrong = next((item for item in getattr(self, name) if not isinstance(item, kind)), None)
            if wrong is not None:
                raise TypeError(f"A section's {name} are of type {kind.__name__}. Received: {type(wrong).__name__}.")
        if self.shown not in SHOWN:
            raise ValueError(f"A section is shown {', '.join(SHOWN)}. Received: {self.shown!r}.")
        if any(part.parts for part in self.parts):
            raise ValueError(f"A part of the section {self.title!r} has parts itself; sections nest one level deep.")
        self._check_table()

    def _check_table(self) -> None:
        headings = [column.heading for column in self.columns]
        own_cells = [column.heading for column in self.columns if not column.under]
        for column in self.columns:
            if column.under and own_cells.count(column.under) != 1:
                raise ValueError(
                    f"The column {column.heading!r} must stand under one other column of the section: "
                    f"{', '.join(own_cells) or 'there is none'}. Received: under={column.under!r}."
                )
        for row in (*self.rows, *([self.total] if self.total else [])):
            if len(row) != len(headings):
                raise ValueError(
                    f"A row of the section {self.title!r} has {len(headings)} values, one for each column "
                    f"({', '.join(headings)}). Received: {len(row)} values."
                )

    def to_dataframe(self) -> Any:
        """Returns the table as a `pandas.DataFrame`, indexed by its first column; without the total.

        Raises:
            ImportError: pandas is not installed.
        """
        heads = [column.heading for column in self.columns]
        return data_frame([dict(zip(heads, row, strict=True)) for row in self.rows], heads[0] if heads else "")

    def sections(self) -> tuple[Section, ...]:
        """Returns the section."""
        return (self,)

    @classmethod
    def from_dict(cls, values: Any) -> Section:
        """Returns the section from the result of `to_dict`. Unknown keys are ignored.

        Raises:
            ValueError: A field is missing or has a wrong value.
            TypeError: A field is of a wrong type.
        """
        found: Section = from_plain(cls, values)
        return found


def _require_texts(item: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(item, name), str):
            what = f"{type(item).__name__.lower()}'s {name}"
            raise TypeError(f"A {what} is a text. Received: {getattr(item, name)!r}.")


def _items(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"A section's {name} are a list. Received: {type(values).__name__}.")
    return tuple(values)


def _values(name: str, values: Any) -> tuple[Value, ...]:
    return tuple(_value(value) for value in _items(name, values))


def _value(value: Any) -> Value:
    if isinstance(value, (list, tuple)) and all(type(item) in (str, int) for item in value):
        return tuple(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        "A cell of a section is None, True, False, an int, a float, a text, or a list of texts or whole numbers. "
        f"Received: {value!r} ({type(value).__name__})."
    )
