"""Splits a model's graph at the end of its frozen part, into two models that share its layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import keras

from prunekit.anatomy.graph.model_graph import graph_of, nested_graph, nodes_of, with_tensors
from prunekit.anatomy.layers.layer_names import Site, find_site
from prunekit.anatomy.layers.layers import draws_random_numbers
from prunekit.anatomy.layers.model_weights import check_built, places


@dataclass(frozen=True, eq=False)
class Cut:
    """A model split into two models.

    Attributes:
        lower: Model from the inputs to a list of boundary tensors.
        upper: Model from the boundary tensors (a single tensor, not a list, if there is one) to the model's outputs.
        names: Paths of the layers whose outputs are the boundary tensors.
    """

    lower: keras.Model
    upper: keras.Model
    names: tuple[str, ...]


def cut(model: Any, boundary: Any = None) -> Cut:
    """Splits the model at the end of its frozen part into two models that share its layers.

    Args:
        model: A built Sequential or functional model; each part adds calls to its layers and changes nothing else.
        boundary: Layers whose outputs end the lower part: a layer's name or path, ("shared", 1) for its second call, or
            a list of these. None puts every frozen layer with only frozen layers below it into the lower part.

    Raises:
        TypeError: `model` is not a Keras 3 model; `boundary` holds a value that is not a name.
        ValueError: The model is not built, or has no graph; no layer or every layer is frozen; a layer below the
            boundary trains, draws random numbers or behaves differently in training; no layer has that name.
    """
    check_built(model)
    _require_graph(model)
    sites = None if boundary is None else _sites(model, boundary)
    division = _divide(model, sites)
    if sites is not None:
        _check_sites(division, sites)
    elif not division.has_weights_below():
        reason = next(filter(None, (_obstacle(node) for node in division.high)), "it has no weights")
        raise ValueError(
            f"Nothing at the bottom of the model {model.name!r} is frozen. Received: {reason}. Set "
            "layer.trainable = False for all layers from the inputs up to the first trained layer."
        )
    if not division.high and not division.nested:
        raise ValueError(
            f"All of the model {model.name!r} lies below the boundary, so nothing is left to train or to evaluate. "
            "Unfreeze the last layers, or name a layer further down with `boundary`."
        )
    return _assemble(division, f"{model.name}_lower", f"{model.name}_upper")


def _require_graph(model: Any) -> None:
    """Raises if the model's computation is not defined by a graph of layers.

    Raises:
        ValueError: The model is a subclass of keras.Model with its own `call`.
    """
    if graph_of(model) is None:
        raise ValueError(
            f"The model {model.name!r} has a `call` of its own, or layers that Keras cannot call symbolically, and "
            f"therefore no graph that can be split. Received: {type(model).__name__}. Build it as keras.Model(inputs, "
            "outputs) or as a Sequential: the frozen part and the trained part as separate layers."
        )


def obstacles(model: Any) -> list[str]:
    """Returns why, per layer call, the model's outputs cannot be computed once and reused; [] if they can."""
    return list(filter(None, map(_obstacle, nodes_of(model))))


# ---------------------------------------------------------------- the graph


def _sites(model: Any, boundary: Any) -> list[Site]:
    several = isinstance(boundary, list | set | frozenset) or (
        isinstance(boundary, tuple) and not (len(boundary) == 2 and isinstance(boundary[1], int))
    )
    names = list(boundary) if several else [boundary]
    if not names:
        raise ValueError("`boundary` names at least one layer. Received: none. Leave it out to have it found.")
    return [find_site(model, name, "boundary") for name in names]


def _obstacle(node: Any) -> str:
    """Returns the reason why the call's outputs cannot be computed once and reused, or "" if they can."""
    layer = node.operation
    if not isinstance(layer, keras.layers.Layer):
        return ""
    if layer.trainable_variables:
        return f"{layer.name!r} has trainable weights ({layer.trainable_variables[0].path})"
    if any(place.layer.activity_regularizer is not None for place in places(layer)):
        return f"{layer.name!r} adds a loss (activity_regularizer)"
    # `training=False` in a call, as in `base(x, training=False)`, has no effect: Keras overrides it in training.
    if graph_of(layer) is not None:
        return next(iter(obstacles(layer)), "")
    for place in places(layer):
        reason = _in_training(place.layer)
        if reason:
            return f"{'/'.join(filter(None, (layer.name, place.full_path)))!r} {reason}"
    return ""


def _in_training(layer: Any) -> str:
    if isinstance(layer, keras.layers.BatchNormalization):
        return "normalises by the batch in training (freeze it)" if layer.trainable else ""
    if isinstance(layer, keras.layers.SpectralNormalization):
        return "rescales its kernel in each training step"
    return "draws random numbers in training" if draws_random_numbers(layer) else ""


# ---------------------------------------------------------------- the division


@dataclass(eq=False)
class _Division:
    """The calls of one graph, below and above a cut.

    Attributes:
        model: Functional or Sequential.
        low: Calls below the cut, in order of execution.
        high: Calls above the cut.
        nested: Calls of nested models that are cut themselves, with their divisions.
        met: Identities of the sites that were found.
    """

    model: Any
    low: list[Any] = field(default_factory=list)
    high: list[Any] = field(default_factory=list)
    nested: list[tuple[Any, "_Division"]] = field(default_factory=list)
    met: set[int] = field(default_factory=set)

    def has_weights_below(self) -> bool:
        """Returns True if any layer below the cut has weights."""
        return any(getattr(node.operation, "weights", ()) for node in self.low_everywhere())

    def low_everywhere(self) -> Iterator[Any]:
        """Yields the calls below the cut, including calls inside nested models."""
        yield from self.low
        for _, division in self.nested:
            yield from division.low_everywhere()


def _divide(model: Any, sites: list[Site] | None) -> _Division:
    return _at_obstacles(model) if sites is None else _at_sites(model, sites)


def _at_obstacles(model: Any) -> _Division:
    """Returns the division whose lower part holds all frozen calls with only frozen calls before them."""
    division = _Division(model)
    known: set[int] = set()
    nodes = nodes_of(model)
    for node in nodes:
        ready = all(id(tensor) in known for tensor in node.input_tensors)
        if node.is_input or (ready and not _obstacle(node)):
            division.low.append(node)
            known.update(map(id, node.outputs))
            continue
        inner = _at_obstacles(node.operation) if ready and _can_be_cut(node, nodes) else None
        if inner is not None and inner.has_weights_below():
            division.nested.append((node, inner))
        else:
            division.high.append(node)
    return division


def _at_sites(model: Any, sites: list[Site]) -> _Division:
    """Returns the division with the named calls and all calls that they need below, and the other calls above."""
    division = _Division(model)
    needed: set[int] = set()
    nodes = nodes_of(model)
    for node in reversed(nodes):
        calls = [other for other in nodes if other.operation is node.operation]
        number = calls.index(node) if len(calls) > 1 else None
        named = [site for site in sites if site.layer is node.operation and site.call in (number, number or 0)]
        division.met.update(map(id, named))
        inner = _at_sites(node.operation, sites) if _can_be_cut(node, nodes) else None
        if inner is not None:
            division.met |= inner.met
        if named or any(id(tensor) in needed for tensor in node.outputs):
            division.low.insert(0, node)
        elif inner is not None and inner.met:
            division.nested.insert(0, (node, inner))
        else:
            division.high.insert(0, node)
            continue
        needed.update(map(id, node.input_tensors))
    return division


def _can_be_cut(node: Any, nodes: list[Any]) -> bool:
    """Returns True if the node is the only call of a nested model with a graph, and passes no mask."""
    others = [value for name, value in node.arguments.kwargs.items() if name != "training" and value is not None]
    return len(node.arguments.args) == 1 and not others and nested_graph(node, nodes) is not None


def _check_sites(division: _Division, sites: list[Site]) -> None:
    for site in sites:
        if id(site) not in division.met:
            raise ValueError(
                f"The model {division.model.name!r} cannot be cut at the outputs of {site.label!r}: the layer is "
                "called several times, or inside a layer or model that is called several times. Received: "
                f"boundary={site.label!r}. Say which call, as in ({site.label!r}, 0), or name the layer around it."
            )
    reasons = list(dict.fromkeys(filter(None, map(_obstacle, division.low_everywhere()))))
    if reasons:
        raise ValueError(
            f"The lower part must be frozen, and compute the same outputs in training and in inference. Received: "
            f"{'; '.join(reasons[:5])}. Set layer.trainable = False where weights train, name a layer further down, or "
            "leave `boundary` out to have it found."
        )


# ---------------------------------------------------------------- the two models


@keras.saving.register_keras_serializable("prunekit")
class MaskedActivations(keras.layers.Layer):
    """(activations, mask) -> the activations with the Keras mask that they have in the whole model."""

    supports_masking = True

    def call(self, inputs):
        """Returns the activations."""
        return inputs[0]

    def compute_mask(self, inputs, previous_mask=None):
        """Returns the mask."""
        return inputs[1]


@dataclass(eq=False)
class _Entries:
    """The inputs of an upper part.

    Attributes:
        taken: Names that layers already have.
        inputs: The inputs added so far.
    """

    taken: set[str]
    inputs: list[Any] = field(default_factory=list)

    def add(self, tensor: Any, name: str) -> Any:
        """Returns a new input with the shape and dtype of the tensor."""
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False) or tensor.dtype == "string":
            raise ValueError(
                f"Activations are kept as dense arrays of numbers. Received: {tensor!r} from {name!r}. Name another "
                "layer with `boundary`."
            )
        names = (f"{name}_{number}" if number else name for number in count())
        free = next(one for one in names if one not in self.taken)
        self.taken.add(free)
        self.inputs.append(keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=free))
        return self.inputs[-1]


def _assemble(division: _Division, lower_name: str, upper_name: str) -> Cut:
    graph = graph_of(division.model)
    entries = _Entries({node.operation.name for node in [*division.high, *(node for node, _ in division.nested)]})
    shown, names, stand_ins = _enter(_crossing(division, graph), entries)
    for node, inner in division.nested:
        outer = node.operation.name
        parts = _assemble(inner, f"{outer}_lower", outer)
        shown += keras.tree.flatten(parts.lower(*node.arguments.args, **node.arguments.kwargs))
        names += [f"{outer}/{name}" for name in parts.names]
        seams = [entries.add(tensor, f"{outer}_{tensor.name}") for tensor in parts.upper.inputs]
        outputs = parts.upper(_unpacked(seams), **node.arguments.kwargs)
        stand_ins.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))
    for node in division.high:
        args, kwargs = with_tensors((node.arguments.args, node.arguments.kwargs), stand_ins)
        outputs = node.operation(*args, **kwargs)
        stand_ins.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))
    return Cut(
        keras.Model(graph.input, shown, name=lower_name),
        keras.Model(_unpacked(entries.inputs), with_tensors(graph.output, stand_ins), name=upper_name),
        tuple(names),
    )


def _enter(crossing: list[tuple[Any, str]], entries: _Entries) -> tuple[list[Any], list[str], dict[int, Any]]:
    """Returns the tensors that cross a cut (masks last), their layers' names (without masks) and {id: upper tensor}."""
    masks = {id(tensor): mask for tensor, _ in crossing if (mask := getattr(tensor, "_keras_mask", None)) is not None}
    of_masks = set(map(id, masks.values()))
    rows = {id(tensor): (tensor, name) for tensor, name in crossing if id(tensor) not in of_masks}
    rows |= {id(mask): (mask, "mask") for mask in masks.values()}
    stand_ins = {key: entries.add(tensor, name) for key, (tensor, name) in rows.items()}
    for key, mask in masks.items():
        wrapped = MaskedActivations(dtype=stand_ins[key].dtype, autocast=False, name=f"{stand_ins[key].name}_masked")
        stand_ins[key] = wrapped([stand_ins[key], stand_ins[id(mask)]])
    names = [name for key, (_, name) in rows.items() if key not in of_masks]
    return [tensor for tensor, _ in rows.values()], names, stand_ins


def _crossing(division: _Division, graph: Any) -> list[tuple[Any, str]]:
    """Returns (tensor, name of its layer) for all tensors that cross the cut from below."""
    used = {id(tensor) for node in division.high for tensor in node.input_tensors} | set(map(id, graph.outputs))
    return [(tensor, node.operation.name) for node in division.low for tensor in node.outputs if id(tensor) in used]


def _unpacked(tensors: list[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors
