"""Reads the report of a run directory as an untrusted file."""

import json
import os
from pathlib import Path
from typing import Any

from prunekit.recipe.state.directory import REPORT
from prunekit.recipe.text.loader import RecipeError

LARGEST_REPORT = 1 << 26


def read_report(directory: str | os.PathLike[str]) -> Any:
    """Returns the values in a run's report.json.

    Raises:
        RecipeError: The file is too large, or not JSON.
        OSError: The file cannot be read.
    """
    path = Path(directory) / REPORT
    with path.open("rb") as file:
        raw = file.read(LARGEST_REPORT + 1)
    if len(raw) > LARGEST_REPORT:
        raise RecipeError(f"{path}: expected a report of at most {LARGEST_REPORT:,} bytes; this file is larger.")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not a report, or damaged: {error}.") from error
