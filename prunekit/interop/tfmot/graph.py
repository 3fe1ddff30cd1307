"""Translates a tf_keras model, wrapped or not, to a Keras 3 model with the same layers, calls and weights."""

from typing import Any

import keras

from prunekit.anatomy.graph.model_graph import calls_of
from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.layers import NotCarried, paired, translated
from prunekit.interop.tfmot.wrappers import Wrapping, bare_activation, passes_through, wrapping


class Translation:
    """A legacy model and its Keras 3 translation; shared layers are translated once.

    Args:
        model: A built Sequential or functional model of tf_keras.

    Attributes:
        model: Keras 3 model.
        pairs: (legacy variable, Keras 3 variable) for every weight.
        wrappings: Contents of the wrappers of the legacy layers.
        lost: Differences of a training in Keras 3, one line each.

    Raises:
        NotCarried: A part of the model has no equivalent in Keras 3.
    """

    def __init__(self, model: Any):
        self._layers: dict[int, Any] = {}
        self._sources: list[tuple[Any, Any, Any]] = []
        self.wrappings: list[Wrapping] = []
        self.lost: list[str] = []
        self.model = self._model(model)
        self.pairs: list[tuple[Any, keras.Variable]] = []
        for layer, new, variables in self._sources:
            self.pairs += paired(layer, new, variables)
        for old, variable in self.pairs:
            variable.assign(old.numpy())
        for _, new, _ in self._sources:
            if isinstance(new, keras.layers.Normalization):
                # Normalization computes with tensors derived from its variables: derive the tensors again.
                new.finalize_state()

    def counterpart(self, variable: Any) -> keras.Variable | None:
        """Returns the Keras 3 variable with the value of a legacy variable; None if no pair has the variable."""
        return next((new for old, new in self.pairs if old is variable), None)

    def _model(self, model: Any) -> keras.Model:
        tf_keras = legacy.tf_keras()
        if isinstance(model, tf_keras.Sequential):
            self._note_pass_throughs(model)
            if not model.inputs:
                raise NotCarried(f"{model.name!r} (a Sequential whose input shape is not known)")
            layers = [layer for layer in model.layers if not passes_through(layer)]
            return keras.Sequential([_input(model.inputs[0]), *map(self._layer, layers)], name=_named(model))
        if not getattr(model, "_is_graph_network", False):
            raise NotCarried(f"{model.name!r} ({type(model).__name__}: a subclassed model, whose code is in no file)")
        self._note_pass_throughs(model)
        nest = _nest()
        structure = model._nested_inputs
        # For inputs in a dictionary, Keras 3 requires input names equal to the keys.
        keys = {id(tensor): key for key, tensor in structure.items()} if isinstance(structure, dict) else {}
        tensors = {id(tensor): _input(tensor, keys.get(id(tensor))) for tensor in model.inputs}
        for node in calls_of(model):
            self._replay(node, tensors)
        inputs = nest.map_structure(lambda tensor: tensors[id(tensor)], structure)
        outputs = nest.map_structure(lambda tensor: tensors[id(tensor)], model._nested_outputs)
        return keras.Model(inputs, outputs, name=_named(model))

    def _note_pass_throughs(self, model: Any) -> None:
        self.wrappings += [one for one in map(wrapping, filter(passes_through, model.layers)) if one]

    def _replay(self, node: Any, tensors: dict[int, Any]) -> None:
        nest = _nest()

        def new(value: Any) -> Any:
            return tensors.get(id(value), value)

        arguments = nest.map_structure(new, tuple(node.call_args))
        options = nest.map_structure(new, dict(node.call_kwargs))
        if passes_through(node.layer):
            outputs = arguments[0]
        else:
            layer = self._layer(node.layer)
            if isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional) and isinstance(arguments[0], list):
                # tf_keras puts initial states that are tensors of the graph into one list with the input.
                (first, *states), *rest = arguments
                arguments, options = (first, *rest), {**options, "initial_state": states}
            self._note_mode(layer, options.pop("training", None))
            outputs = layer(*arguments, **options)
        for old, one in zip(nest.flatten(node.outputs), nest.flatten(outputs), strict=True):
            tensors[id(old)] = one

    def _note_mode(self, layer: Any, training: Any) -> None:
        """Raises or records a difference if a layer call sets `training`: in Keras 3 the model's call sets the mode."""
        if training is None or not any(map(_minds_training, layer._flatten_layers())):
            return
        if not isinstance(training, bool | int) or training:
            raise NotCarried(
                f"{layer.name!r} (called with training={training}: Keras 3 sets the mode in the call of the model)"
            )
        self.lost.append(
            f"the call of {layer.name!r} with training=False: it computes the same, but in a training Keras 3 has it "
            "trained, too; build that part with trainable=False and without dropout"
        )

    def _layer(self, layer: Any) -> Any:
        around = wrapping(layer)
        inner = around.layer if around else layer
        if id(inner) not in self._layers:
            self._layers[id(inner)] = self._made(inner, around)
        return self._layers[id(inner)]

    def _made(self, inner: Any, around: Wrapping | None) -> Any:
        if isinstance(inner, legacy.tf_keras().Model):
            nested = self._model(inner)
            if not inner.trainable:
                # A frozen model trains none of its layers, even if a layer's own `trainable` is True.
                nested.trainable = False
            return nested
        if around:
            self.wrappings.append(around)
        new = translated(inner, bare_activation)
        self._sources.append((inner, new, around.variables if around else None))
        return new


def _minds_training(layer: Any) -> bool:
    """Returns True if the layer itself, apart from its sublayers, computes differently in training mode."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return layer.trainable
    # Attributes of dropout layers, recurrent cells, attention and noise layers.
    names = ("rate", "dropout", "recurrent_dropout", "stddev")
    return any(isinstance(rate := getattr(layer, name, None), int | float) and rate > 0 for name in names)


def _named(model: Any) -> str:
    return model.name.replace("/", "_")


def _input(tensor: Any, name: str | None = None) -> Any:
    layer = tensor.node.layer
    if type(tensor.type_spec).__name__ != "TensorSpec":
        raise NotCarried(f"{layer.name!r} (an input that is not a dense tensor: {type(tensor.type_spec).__name__})")
    name = (name or layer.name).replace("/", "_")
    return keras.Input(batch_shape=tuple(tensor.shape), dtype=tensor.dtype.name, name=name)


def _nest() -> Any:
    import tensorflow as tf

    return tf.nest
