"""Error message for a backend of Keras that is not installed."""

import os

_BACKENDS = ("tensorflow", "jax", "torch")


def missing_backend(what: str, error: ImportError) -> str | None:
    """Returns an error message if the package of a backend is not installed; None for any other error.

    Args:
        what: First words of the message: what needs the package.
        error: The error of the import.
    """
    # The name of a submodule would mean that the package is installed and damaged.
    if error.name not in _BACKENDS:
        return None
    text = f"{what} needs the package {error.name}, which is not installed. Install it (pip install {error.name})"
    if os.environ.get("KERAS_BACKEND", error.name) != error.name:
        return f"{text}: the backend that is set cannot do this (docs/backends.md)."
    others = " or ".join(name for name in _BACKENDS if name != error.name)
    return f"{text}, or, for all that other backends run (docs/backends.md), set KERAS_BACKEND={others}."
