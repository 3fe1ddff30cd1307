"""The recipes that come with prunekit, as they can be run on each backend."""

from pathlib import Path

import yaml
from backends import BACKEND

RECIPES = Path(__file__).parents[2] / "recipes"
# Of the recipes with all formats.
FORMATS = ["keras", "litert", "litert-sparse", "litert-float16", "litert-dynamic-int8"]
COMPRESS = """
import sys
from prunekit.recipe.run.runner import compress
compress(sys.argv[1], output=sys.argv[2], force=True)
"""


def runnable(name: str, folder: Path) -> str:
    """The recipe as it comes; where Keras has no TensorFlow, a copy of it without what needs TensorFlow."""
    if BACKEND == "tensorflow":
        return name
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    recipe["steps"] = [step for step in recipe["steps"] if "quantize" not in step]
    for step in recipe["steps"]:
        if "export" in step:
            assert {"keras", "litert"} <= set(step["export"]["formats"])
            step["export"]["formats"] = ["keras"]
        step.get("expect", {}).pop("bytes", None)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return str(folder / f"{name}.yaml")
