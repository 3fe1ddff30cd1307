"""Base class of reports: their sections, as a page in notebooks and as text, JSON values and a data frame of pandas."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

from prunekit.anatomy.records.plain_data import Record

# As text: these are in folders below, and are imported when a report is shown.
_PAGE = "prunekit.delivery.pages.notebook"
_TERMINAL = "prunekit.delivery.reports.terminal_report"


class Displayed(Record):
    """Base class of reports, which notebooks show with the tables and pictures of the report page.

    Attributes:
        main_items: Name of the field with the main items, each a row of the data frame; their first field is its index.
        makes: The function in a folder below that makes the sections, as "module:name", for a class that does not.
    """

    main_items: ClassVar[str] = ""
    makes: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # `dataclass` adds one with all fields to a class that has none itself.
        cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Returns the kind of the report, the model's name and the verdict; `print` shows all of it."""
        name = getattr(self, "model_name", None)
        named = "" if name is None else f" {name!r}"
        return f"<{type(self).__name__}{named}: {self.verdict()}>"

    def verdict(self) -> str:
        """Returns the report in one sentence."""
        return next(iter(str(self).splitlines()), "")

    def __call__(self) -> Self:
        """Returns the report itself, and warns: `report` was a method, and is a property."""
        warnings.warn("`report` is now a property: write it without parentheses.", DeprecationWarning, stacklevel=2)
        return self

    def sections(self) -> tuple[Any, ...]:
        """Returns the report as `Section`s, which every form of it shows."""
        module, _, name = self.makes.partition(":")
        return tuple(getattr(importlib.import_module(module), name)(self))

    def to_dataframe(self) -> Any:
        """Returns the main items as a `pandas.DataFrame`, one row per item, indexed by its name.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [
            asdict(item) | {name: getattr(item, name) for name in getattr(item, "derived", ())}
            for item in getattr(self, self.main_items)
        ]
        return data_frame(rows, next(iter(rows[0])) if rows else "name")

    def __str__(self) -> str:
        """Returns the sections as plain text."""
        text: str = importlib.import_module(_TERMINAL).text_of(self.sections())
        return text

    def _repr_html_(self) -> str:
        """Returns the result as HTML; IPython calls this method."""
        html: str = importlib.import_module(_PAGE).html_of(self)
        return html


def data_frame(rows: Sequence[Mapping[str, Any]], index: str) -> Any:
    """Returns rows as a `pandas.DataFrame`.

    Args:
        rows: Column -> value, for each row.
        index: Name of the column that becomes the index.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "to_dataframe() needs pandas, which is not installed: pip install 'prunekit[notebook]'."
        ) from error
    return pandas.DataFrame(list(rows)).set_index(index) if rows else pandas.DataFrame({index: []}).set_index(index)
