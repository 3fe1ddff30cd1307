"""Layers of a model that read texts: their lookup stays outside of the integers, and outside of LiteRT files."""

from __future__ import annotations

from typing import Any

import keras

from prunekit.anatomy.graph.model_graph import graph_of, nodes_of


def reads_texts(model: Any) -> bool:
    """Returns True if an input of a model is one of texts."""
    return any(_is_text(one) for one in getattr(model, "inputs", None) or ())


def text_readers(model: Any) -> list[str]:
    """Returns the names of the layers that make numbers of texts; [] for a model without a graph of layers."""
    if graph_of(model) is None:
        return []
    return [
        node.operation.name
        for node in nodes_of(model)
        if not node.is_input and any(map(_is_text, node.input_tensors)) and not any(map(_is_text, node.outputs))
    ]


def text_notes(model: Any) -> tuple[str, ...]:
    """Returns a remark on the layers that read texts, and how to run them; () for a model without."""
    if not reads_texts(model):
        return ()
    readers = text_readers(model) or ["NAME"]
    one = readers[0]
    return (
        f"{', '.join(readers)} {'reads' if len(readers) == 1 else 'read'} texts, outside of the integers: a Keras file "
        '(export("NAME.keras")) runs all of the model; for a LiteRT file, quantize the part behind, and give it what '
        f"model.get_layer({one!r})(texts) returns.",
    )


def _is_text(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype) == "string"
