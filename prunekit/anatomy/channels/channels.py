"""Finds which axes of which weights must shrink together: the groups of channels of a model."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, components
from prunekit.anatomy.channels.channel_calls import ChannelCall, NotFollowedError
from prunekit.anatomy.channels.channel_layers import layer_rule
from prunekit.anatomy.channels.channel_links import STAYS, Links, WeightAxes
from prunekit.anatomy.channels.channel_operations import operation_rule
from prunekit.anatomy.channels.keras_hub_calls import lost_mask
from prunekit.anatomy.channels.recorded_calls import (
    RecordedCall,
    graph_call,
    recorded,
    recorded_function,
    recorded_model,
)
from prunekit.anatomy.graph.model_graph import tensors_in
from prunekit.anatomy.layers.model_weights import check_built, weights_in
from prunekit.anatomy.records.reports import Skipped

OUTPUT = "an output of the model"


@dataclass(frozen=True, eq=False)
class Member:
    """One axis of one weight that a group shrinks.

    Attributes:
        weight: Name of the weight.
        axis: The axis.
        channels: The channel of each index of the axis.
    """

    weight: str
    axis: int
    channels: np.ndarray


@dataclass(frozen=True, eq=False)
class Group:
    """Channels that occur in the same axes of the same weights, or whose parts do.

    Attributes:
        name: Name of the layer that computes the channels, made unique.
        channels: The channels, in their order in the first axis.
        members: The axes that lose an index, or several, with each channel.
        parts: Number of equal runs of channels that must lose as many channels each (grouped convolutions, the two
            directions of a recurrent layer).
    """

    name: str
    channels: np.ndarray
    members: tuple[Member, ...]
    parts: int = 1


@dataclass(frozen=True)
class Stop(Skipped):
    """Channels that cannot be removed.

    Attributes:
        name: Path of the layer or operation that keeps them; "" for the outputs.
        reason: Why it keeps them.
        channels: How many.
        layers: The layers that compute them; the name itself for a layer whose own channels stay.
    """

    channels: int
    layers: tuple[str, ...]

    @property
    def place(self) -> str:
        """Former name of `name`; warns."""
        warnings.warn("`place` of skipped channels is now `name`.", DeprecationWarning, stacklevel=2)
        return self.name


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of a model.

    Attributes:
        model: The model.
        groups: The groups of channels that can be removed.
        stops: The layers and operations that keep the other channels, with reasons.
        channel_of: The channel of each number in `links`: numbers that are tied have the same channel.
        links: Weights, and arguments of layers, that depend on channels.
        opened: id of a call's node -> the calls inside it.
        met: id of a call's node -> the channels of all tensors and weights inside it.
    """

    model: Any
    groups: tuple[Group, ...]
    stops: tuple[Stop, ...]
    channel_of: np.ndarray
    links: Links
    opened: dict[int, RecordedCall] = field(default_factory=dict)
    met: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def kept_numbers(self, removed: np.ndarray) -> np.ndarray:
        """Returns for each number whether its channel is kept, for an array of removed channels."""
        kept = np.ones(self.channel_of.size, bool)
        kept[removed] = False
        return kept[self.channel_of]

    def sizes(self, kept: np.ndarray) -> dict[int, int]:
        """Returns {id of a weight: its number of entries} for the weights that depend on channels."""
        return {key: _size(axes, kept) for key, axes in self.links.weights.items()}


def _size(axes: WeightAxes, kept: np.ndarray) -> int:
    shape = list(axes.variable.shape)
    for axis, numbers in axes.channels.items():
        shape[axis] = int(np.count_nonzero(kept[numbers])) // (numbers.shape[0] if numbers.ndim > 1 else 1)
    return math.prod(shape)


def find_channels(model: Any, approximate: Sequence[str] = ()) -> Channels:
    """Returns the groups of channels of a built model.

    A model without a graph of layers is called on symbolic inputs.

    Args:
        model: The model.
        approximate: Layers that keep no channels, because an approximation is allowed; see `APPROXIMATIONS`.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built; it has no graph, and its `call` cannot be followed.
    """
    check_built(model)
    walk = _Walk(approximate)
    walk.links.keep_all(walk.model(model), OUTPUT)
    return _grouped(model, walk)


# ---- following the calls ---------------------------------------------------------------------------------------------


class _Walk:
    """Follows the calls of a model and collects links."""

    def __init__(self, approximate: Sequence[str]) -> None:
        self.links = Links(approximate)
        self.opened: dict[int, RecordedCall] = {}
        self.met: dict[int, list[np.ndarray]] = {}

    def model(self, model: Any) -> list[Axes]:
        """Returns the axes of the outputs of the whole model, whose `call` is recorded if it has no graph."""
        call = graph_call(model)
        if call is None:
            call = self.opened[id(model)] = recorded_model(model)
        return self._through(call, [Axes.fixed(one.shape) for one in tensors_in(call.args)])

    def follow(self, layer: Any, *inputs: Axes) -> list[Axes]:
        """Returns the axes of the outputs of a layer inside the present one."""
        shapes = [keras.KerasTensor(one.shape, dtype=layer.compute_dtype) for one in inputs]
        outputs = layer.compute_output_spec(*shapes)
        found = tuple(tuple(one.shape) for one in keras.tree.flatten(outputs))
        return self.call(ChannelCall(layer, tuple(inputs), {}, found))

    def through(self, function: Any, x: Axes) -> Axes:
        """Returns the axes of the output of a function of `keras.ops`."""
        name = getattr(function, "__name__", str(function))
        tensor = keras.KerasTensor(x.shape, dtype=keras.config.floatx())
        nodes = recorded_function(function, tensor)
        if nodes is None:
            raise NotFollowedError(f"the function {name!r} is not known, and cannot be followed")
        facts = {id(tensor): x}
        with self.links.all_channels_fixed(f"inside the function {name!r}"):
            self._nodes(nodes, facts)
        return facts[id(nodes[-1].outputs[0])] if nodes else x

    def _nodes(self, nodes: Sequence[Any], facts: dict[int, Axes]) -> None:
        def known(leaf: Any) -> Any:
            if isinstance(leaf, keras.KerasTensor):
                return facts[id(leaf)]
            return self._of_variable(leaf) if isinstance(leaf, keras.Variable) else leaf

        for node in nodes:
            args, kwargs = keras.tree.map_structure(known, (node.arguments.args, node.arguments.kwargs))
            call = ChannelCall(node.operation, args, kwargs, tuple(tuple(one.shape) for one in node.outputs), node)
            for tensor, axes in zip(node.outputs, self.call(call), strict=True):
                facts[id(tensor)] = axes

    def _of_variable(self, variable: Any) -> Axes:
        axes = tuple(self.links.weight(variable, axis) if n > 1 else None for axis, n in enumerate(variable.shape))
        return Axes(tuple(variable.shape), axes)

    def call(self, call: ChannelCall) -> list[Axes]:
        """Returns the axes of the outputs of a call; a call without a rule keeps the channels of its inputs."""
        operation = call.operation
        with self.links.at(operation.name):
            try:
                found = self._by_rule(call)
                _check(found, call)
                return found
            except NotFollowedError as reason:
                self._wall(call, str(reason))
                return [Axes.fixed(shape) for shape in call.outputs]

    def _by_rule(self, call: ChannelCall) -> list[Axes]:
        operation = call.operation
        if not isinstance(operation, keras.layers.Layer):
            rule = operation_rule(operation)
            if rule is None:
                raise NotFollowedError(f"the operation {type(operation).__name__} is not known")
            return list(rule(self, call))
        graph = graph_call(operation)
        if graph is not None:
            return self._through(graph, keras.tree.flatten(call.argument("inputs", 0)))
        rule = layer_rule(operation)
        if rule is not None:
            return list(rule(self, call))
        if not operation.weights and not any(one.labelled for one in call.inputs):
            return [Axes.fixed(shape) for shape in call.outputs]
        return self.inside(call)

    def inside(self, call: ChannelCall) -> list[Axes]:
        """Returns the axes of the outputs of a call from the calls inside its layer, which may replace the layer."""
        layer, node, kind = call.operation, call.node, type(call.operation).__name__
        missing = "" if node is None else lost_mask(layer, node.arguments.args, node.arguments.kwargs)
        if missing:
            raise NotFollowedError(f"the mask of its input is not followed: pass it to the layer as `{missing}`")
        found = None if node is None else recorded(layer, node.arguments.args, node.arguments.kwargs)
        if found is None:
            raise NotFollowedError(f"the layer type {kind} is not known, and its `call` cannot be followed")
        self.opened[id(node)] = found
        if not found.repeatable:
            raise NotFollowedError(f"a layer of type {kind}, which cannot be replaced by the layers inside it")
        # Lengths that are open outside may be fixed here.
        shapes = [tuple(one.shape) for one in tensors_in((found.args, found.kwargs))]
        inputs = [replace(axes, shape=shape) for axes, shape in zip(call.inputs, shapes, strict=True)]
        made = self._through(found, inputs)
        weights = (self.links.weights.get(id(variable)) for variable in layer.variables)
        self.met[id(node)] = [
            *(numbers for one in [*call.inputs, *made] for numbers in one.channels if numbers is not None),
            *(numbers for axes in weights if axes is not None for numbers in axes.channels.values()),
        ]
        return made

    def _through(self, call: RecordedCall, inputs: Sequence[Axes]) -> list[Axes]:
        """Returns the axes of the outputs of calls, for those of the tensors in the arguments."""
        facts = dict(zip(map(id, tensors_in((call.args, call.kwargs))), inputs, strict=True))
        self._nodes(call.nodes, facts)
        return [facts[id(tensor)] for tensor in keras.tree.flatten(call.outputs)]

    def _wall(self, call: ChannelCall, reason: str) -> None:
        self.links.keep_all(call.inputs, reason)
        if getattr(call.operation, "weights", ()):
            self.links.stay(reason)
        for variable in getattr(call.operation, "variables", ()):
            axes = self.links.weights.get(id(variable))
            for numbers in axes.channels.values() if axes else ():
                self.links.keep(numbers, reason)


def _check(found: Sequence[Axes], call: ChannelCall) -> None:
    """Raises unless the axes fit the shapes of the outputs."""
    fits = len(found) == len(call.outputs)
    for axes, shape in zip(found, call.outputs, strict=False):
        fits = fits and len(axes.channels) == len(shape)
        pairs = zip(axes.channels, shape, strict=False)
        fits = fits and all(numbers is None or numbers.size == length for numbers, length in pairs)
    if not fits:
        raise NotFollowedError("its outputs have other axes than prunekit expects")


# ---- from links to groups --------------------------------------------------------------------------------------------


def _grouped(model: Any, walk: _Walk) -> Channels:
    links = walk.links
    links.keep_fixed()
    joined = _components(links.size, links.edges)
    edges = [*links.edges, *((wall.numbers, np.full(wall.numbers.size, STAYS)) for wall in links.walls)]
    of = _components(links.size, edges)
    names = {id(weight.variable): weight for weight in weights_in(model)}
    groups = _groups(links, of, {}, names)
    whole = {frozenset(group.channels.tolist()) for group in groups}
    separate = [one for one in links.even if not (_is_free(one, of, links.even) and _is_whole(one, of, whole))]
    if links.even:
        # In the other matrices, the channels at the same place of every part are removed together.
        edges += [(np.repeat(m[0], m.shape[0] - 1), m[1:].T.reshape(-1)) for m in separate]
        of = _components(links.size, edges)
        free = (one for one in links.even if not any(one is other for other in separate))
        groups = _groups(links, of, {int(of[one[0, 0]]): one for one in free}, names)
    return Channels(model, groups, _stops(links, joined, names), of, links, walk.opened, walk.met)


def _components(size: int, edges: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    if not edges:
        return np.arange(size)
    return components(size, np.concatenate([one for one, _ in edges]), np.concatenate([other for _, other in edges]))


def _is_free(matrix: np.ndarray, of: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Returns True if the channels of each part can be chosen apart from those of the other parts."""
    found = of[matrix]
    if np.unique(found).size != found.size or (found == STAYS).any():
        return False
    crossing = [other for other in others if other.shape != matrix.shape or not np.array_equal(of[other], found)]
    return not any(np.isin(of[other], found).any() for other in crossing)


def _is_whole(matrix: np.ndarray, of: np.ndarray, groups: Collection[frozenset[int]]) -> bool:
    """Returns True if the channels of all parts are a group, or those of each part are one."""
    return frozenset(of[matrix].flat) in groups or all(frozenset(of[part].tolist()) in groups for part in matrix)


def _groups(links: Links, of: np.ndarray, parts: dict[int, np.ndarray], names: dict[int, Any]) -> tuple[Group, ...]:
    """Returns the groups; `parts`: a channel -> all channels that are kept evenly with it, shape (parts, channels)."""
    rows = [(axes, axis, of[numbers]) for axes in links.weights.values() for axis, numbers in axes.channels.items()]
    # Channels that occur in the same rows have the same sum of the rows' random numbers.
    signature = np.zeros(of.size, np.uint64)
    draw = np.random.default_rng(0)
    for *_, found in rows:
        signature[np.unique(found)] += draw.integers(1, 2**63, dtype=np.uint64)
    for together in parts.values():
        # Parts in weights of their own, such as the two directions of a layer, are one group, too.
        signature[of[together]] = signature[of[together[0, 0]]]
    channels: dict[int, np.ndarray] = {}
    members: dict[int, list[Member]] = {}
    for axes, axis, found in rows:
        flat = found.reshape(-1)
        flat = flat[np.sort(np.unique(flat, return_index=True)[1])]
        flat = flat[flat != STAYS]
        for value in dict.fromkeys(signature[flat].tolist()):
            channels.setdefault(value, flat[signature[flat] == value])
            members.setdefault(value, []).append(Member(_name(axes, names), axis, found))
    # In the order of the model's layers; branches may be followed in another order.
    places = {weight.name: place for place, weight in enumerate(names.values())}
    order = sorted(channels, key=lambda value: places.get(members[value][0].weight, len(places)))
    titles = {int(of[number]): title for number, title in links.titles.items()}
    unique = _unique(
        [titles.get(int(channels[value][0])) or members[value][0].weight.rpartition("/")[0] for value in order]
    )
    made = [(name, channels[value], members[value]) for name, value in zip(unique, order, strict=True)]
    groups = []
    for name, found, of_group in made:
        matrix = next((one for channel, one in parts.items() if channel in found), None)
        ordered = found if matrix is None else of[matrix].reshape(-1)
        groups.append(Group(name, ordered, tuple(of_group), 1 if matrix is None else matrix.shape[0]))
    return tuple(groups)


def _unique(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def _name(axes: WeightAxes, names: dict[int, Any]) -> str:
    return names[id(axes.variable)].name if id(axes.variable) in names else axes.name


def _stops(links: Links, joined: np.ndarray, names: dict[int, Any]) -> tuple[Stop, ...]:
    """Returns what keeps channels; `joined` has the channel of each number before any channel was kept."""
    makers: dict[int, list[str]] = {}
    for axes in links.weights.values():
        layer, spec = _name(axes, names).rpartition("/")[0], getattr(names.get(id(axes.variable)), "spec", None)
        for axis, numbers in axes.channels.items():
            if spec is None or axis in spec.out_axes:
                for channel in np.unique(joined[numbers]):
                    makers.setdefault(int(channel), []).append(layer)
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for wall in links.walls:
        found.setdefault((wall.place, wall.reason), []).append(np.unique(joined[wall.numbers]))
    stops = []
    for (place, reason), parts in found.items():
        channels = np.unique(np.concatenate(parts))
        layers = dict.fromkeys(layer for channel in channels.tolist() for layer in makers.get(channel, ()))
        stops.append(Stop(place, reason, channels.size, tuple(layers) or (place,)))
    return tuple(stops)
