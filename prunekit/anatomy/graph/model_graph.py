"""The graph of layer calls of a Sequential or functional model."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras


def graph_of(model: Any) -> Any:
    """Returns the functional model whose graph defines the model's `call`, or None if there is no such graph."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    # The class of functional models has no public name in Keras.
    kinds: list[Any] = [base for base in type(model).__mro__ if base.__name__ == "Functional"]
    return model if kinds and type(model).call is kinds[0].call else None


def nodes_of(model: Any) -> list[Any]:
    """Returns the calls in a model's graph, in their order of execution."""
    levels = graph_of(model)._nodes_by_depth
    return [node for depth in sorted(levels, reverse=True) for node in levels[depth]]


def calls_of(model: Any) -> list[Any]:
    """Returns the calls in a model's graph without its inputs, in their order of execution."""
    return [node for node in nodes_of(model) if not node.is_input]


def tensors_in(structure: Any) -> list[Any]:
    """Returns the symbolic tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(structure) if isinstance(leaf, keras.KerasTensor)]


def reads_inputs_alone(node: Any) -> bool:
    """Returns True if a call of a nested model has no mask and no argument besides the inputs and `training`."""
    # Keras writes down a mask of None for each of several inputs.
    given = len(node.arguments.args) + ("inputs" in node.arguments.kwargs)
    return given == 1 and all(
        name in ("inputs", "training") or all(one is None for one in keras.tree.flatten(value))
        for name, value in node.arguments.kwargs.items()
    )


def inputs_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the inputs in the arguments of a call of a model."""
    return args[0] if args else kwargs.get("inputs")
