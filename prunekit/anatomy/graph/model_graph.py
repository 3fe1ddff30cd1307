"""The graph of layer calls of a Sequential or functional model: its nodes, their tensors and arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

# The class of functional models has no public name in Keras.
from keras.src.models.functional import Functional


def graph_of(model: Any) -> Any:
    """Returns the functional model whose graph defines the model's `call`, or None if there is no such graph."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def nodes_of(model: Any) -> list[Any]:
    """Returns the calls in the graph of a model, or in a graph itself, in their order of execution."""
    levels = (graph_of(model) or model)._nodes_by_depth
    return [node for depth in sorted(levels, reverse=True) for node in levels[depth]]


def calls_of(model: Any) -> list[Any]:
    """Returns `nodes_of` without the nodes of inputs."""
    return [node for node in nodes_of(model) if not node.is_input]


def nested_graph(node: Any, nodes: Sequence[Any]) -> Any:
    """Returns the graph of a nested model that is called by one node alone; None for other nodes.

    Args:
        node: The node.
        nodes: All nodes of its graph.
    """
    graph = graph_of(node.operation)
    return graph if graph is not None and sum(one.operation is node.operation for one in nodes) == 1 else None


def filled(node: Any, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of a node's call in inference.

    Args:
        node: The node.
        values: id of a symbolic tensor that the node reads -> its value.
    """
    args, kwargs = node.arguments.fill_in(values)
    in_inference = {"training": False} if "training" in getattr(node.operation, "_call_context_args", ()) else {}
    return args, {**kwargs, **in_inference}


def tensors_in(structure: Any) -> list[Any]:
    """Returns the symbolic tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(structure) if isinstance(leaf, keras.KerasTensor)]


def with_tensors(structure: Any, tensors: Mapping[int, Any]) -> Any:
    """Returns a structure with other tensors.

    Args:
        structure: The structure.
        tensors: id of a tensor in the structure -> the tensor that replaces it.
    """
    return keras.tree.map_structure(lambda leaf: tensors.get(id(leaf), leaf), structure)


def reads_inputs_alone(node: Any) -> bool:
    """Returns True if a call of a nested model has no mask and no argument besides the inputs and `training`."""
    # Keras writes down a mask of None for each of several inputs.
    given = len(node.arguments.args) + ("inputs" in node.arguments.kwargs)
    return given == 1 and all(
        name in ("inputs", "training") or all(leaf is None for leaf in keras.tree.flatten(value))
        for name, value in node.arguments.kwargs.items()
    )


def inputs_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the inputs in the arguments of a call of a model."""
    return args[0] if args else kwargs.get("inputs")
