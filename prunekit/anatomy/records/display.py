"""Shows results in notebooks, and converts them to data frames of pandas."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

# As text: the renderer is in a folder below, and is imported when a notebook asks for it.
_RENDERER = "prunekit.delivery.pages.notebook"


class Displayed:
    """Base class of results that notebooks show with the tables and pictures of the report page."""

    def _repr_html_(self) -> str:
        """Returns the result as HTML; IPython calls this method."""
        return importlib.import_module(_RENDERER).html_of(self)


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
