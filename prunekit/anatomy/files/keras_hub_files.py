"""Classes of KerasHub in model files: imports KerasHub when a file names one, and refuses arguments that are paths."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import keras

from prunekit.anatomy.files.archives import FileRefused
from prunekit.anatomy.layers.keras_hub_layers import PACKAGE

# KerasHub registers its classes under its former name, too.
_NAMES = (PACKAGE, "keras_nlp")
# Arguments of tokenizers, for which a text is the path of a file. Saved models hold their vocabularies as assets.
_PATHS = ("vocabulary", "merges", "proto")


def is_hub_layer(value: Mapping[str, Any], path: str) -> bool:
    """Returns True if an object of a model's description is a layer of KerasHub; imports KerasHub for its objects.

    Args:
        value: The object: a mapping with "module", "class_name", "config" and perhaps "registered_name".
        path: The model file, for error messages.

    Raises:
        FileRefused: KerasHub cannot be imported, or an argument names another file.
    """
    module, name, config = (value.get(key) for key in ("module", "class_name", "config"))
    package = str(module).partition(".")[0]
    if package not in _NAMES and str(value.get("registered_name")).partition(">")[0] not in _NAMES:
        return False
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:
        raise FileRefused(
            f"{path} cannot be read: it needs {str(name)[:80]} of KerasHub, which cannot be imported here ({error}). "
            "Install it: pip install 'prunekit[hub]'."
        ) from error
    for argument in _PATHS:
        if isinstance(config, dict) and isinstance(config.get(argument), str):
            raise FileRefused(f"{path} cannot be read: {str(name)[:80]} takes its {argument} from another file.")
    # Modules of KerasHub that `import keras_hub` does not import, such as converters of files, are left out.
    found = vars(sys.modules[str(module)]).get(str(name)) if package == PACKAGE and module in sys.modules else None
    return isinstance(found, type) and issubclass(found, keras.layers.Layer)
