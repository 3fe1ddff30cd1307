"""Converts the optimizer of a legacy training, with slots and update count, and the loss to Keras 3."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.files import LegacyFile
from prunekit.interop.tfmot.graph import Translation

_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "RMSprop", "SGD")
# Loss reductions of both libraries -> Keras 3 arguments; tf_keras's default reductions equal Keras 3's default.
_REDUCTIONS: dict[str, dict[str, str]] = {"auto": {}, "sum_over_batch_size": {}, "sum": {"reduction": "sum"}}
# Non-numeric settings of tf_keras optimizers that Keras 3 chooses itself.
_DROPPED = ("is_legacy_optimizer", "jit_compile", "name")
# tf_keras's defaults for running training steps; only .keras files contain these settings.
_USUAL: dict[str, tuple[Any, ...]] = {
    "run_eagerly": (None, False),
    "steps_per_execution": (None, 1),
    "jit_compile": (None,),
}
_LOSSES = frozenset(name for name in dir(keras.losses) if not name.startswith("_"))


def carried_optimizer(file: LegacyFile, translation: Translation) -> tuple[keras.optimizers.Optimizer | None, str]:
    """Returns the Keras 3 optimizer with the legacy state, or None; and the reason if optimizer or state are lost.

    The reason is empty if everything is carried, or if the file contains no optimizer.
    """
    name, config = _named(file.training)
    if not name:
        return None, ""
    if name not in _OPTIMIZERS:
        return None, f"the optimizer {name}: only {', '.join(_OPTIMIZERS)} are converted"
    if config.get("is_legacy_optimizer"):
        return None, f"the optimizer {name}: it is one of tf_keras.optimizers.legacy"
    settings, unknown = _settings(name, config)
    if unknown:
        return None, f"the optimizer {name}: Keras 3 has no {unknown}"
    optimizer = getattr(keras.optimizers, name)(**settings)
    if not file.slots:
        return optimizer, f"the state of the optimizer {name}: the file has none"
    return _with_slots(optimizer, name, config, file, translation)


def carried_loss(training: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the loss for Keras 3's `compile`, or None, and the reason; the reason is empty if no loss is lost."""
    loss = training.get("loss")
    if loss is None:
        return None, ""
    if training.get("loss_weights") is not None:
        return None, f"the loss weights {training['loss_weights']}: name them in compile()"
    if isinstance(loss, dict) and isinstance(loss.get("class_name"), str) and isinstance(loss.get("config"), dict):
        settings = {key: value for key, value in loss["config"].items() if key not in ("fn", "name")}
        name, reduction = loss["class_name"], str(settings.pop("reduction", None) or "auto")
        if reduction not in _REDUCTIONS:
            return None, f"the loss {name}: its reduction {reduction!r} trains differently in Keras 3"
        settings |= _REDUCTIONS[reduction]
        if name in _LOSSES and set(settings) <= {*inspect.signature(getattr(keras.losses, name)).parameters}:
            return getattr(keras.losses, name)(**settings), ""
    if isinstance(loss, str):
        with contextlib.suppress(ValueError):
            keras.losses.get(loss)
            return loss, ""
    return None, f"the loss {loss if isinstance(loss, str) else 'that the model was compiled with'}"


def lost_settings(training: Mapping[str, Any]) -> str:
    """Returns the non-default `compile` settings, which are not carried, as text; empty if all are defaults."""
    given = {name: training.get(name) for name in _USUAL}
    found = [f"{name}={one}" for name, one in given.items() if isinstance(one, int) and one not in _USUAL[name]]
    return f"{', '.join(found)}: name them in compile()" if found else ""


def _named(training: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns class name and config of the optimizer, from any of the three forms in legacy files."""
    found = training.get("optimizer_config") or training.get("optimizer")
    if isinstance(found, str):
        names = {name.lower(): name for name in _OPTIMIZERS}
        return names.get(found.lower(), found), {"is_legacy_optimizer": False}
    if not isinstance(found, dict) or not isinstance(found.get("class_name"), str):
        return "", {}
    config = dict(found.get("config") or {})
    # Configs without this key come from versions whose optimizers are now in tf_keras.optimizers.legacy.
    config.setdefault("is_legacy_optimizer", True)
    return found["class_name"].split(">")[-1], config


def _settings(name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the arguments for the Keras 3 class, and the first setting without an equivalent, else ""."""
    known = inspect.signature(getattr(keras.optimizers, name).__init__).parameters
    settings = {}
    for key, value in config.items():
        if key in _DROPPED:
            continue
        if key == "learning_rate" and isinstance(value, dict):
            value = _rate(value)
        if key not in known or value is None and key == "learning_rate":
            return {}, f"{key}={config[key]!r}"
        settings[key] = value
    return settings, ""


def _rate(serialised: Mapping[str, Any]) -> Any:
    """Returns the Keras 3 learning rate schedule of the same class and numbers; None without an equivalent."""
    found = getattr(keras.optimizers.schedules, str(serialised.get("class_name")), None)
    config = {key: value for key, value in (serialised.get("config") or {}).items() if value is not None}
    plain = all(isinstance(value, int | float | str | bool | list) for value in config.values())
    return found(**config) if isinstance(found, type) and plain else None


def _with_slots(
    optimizer: Any, name: str, config: Mapping[str, Any], file: LegacyFile, translation: Translation
) -> tuple[Any, str]:
    trained = file.model.trainable_variables
    places = {id(translation.counterpart(variable)): place for place, variable in enumerate(trained)}
    ours = translation.model.trainable_variables
    if len(places) != len(trained) or not all(id(variable) in places for variable in ours):
        return optimizer, f"the state of the optimizer {name}: it updated variables that the plain model does not have"
    source = _rebuilt(name, config, trained)
    variables = list(source.variables)
    if [tuple(one.shape) for one in variables] != [tuple(one.shape) for one in file.slots]:
        return optimizer, f"the state of the optimizer {name}: its variables are not those of this version of tf_keras"
    for variable, value in zip(variables, file.slots, strict=True):
        variable.assign(value)
    optimizer.build(ours)
    for attribute, slots in vars(optimizer).items():
        if attribute in ("_trainable_variables", "_variables") or not _is_slots(slots, len(ours)):
            continue
        # Names of the same slots can differ by an underscore, for example in Lion.
        held = getattr(source, attribute, getattr(source, attribute.strip("_"), None))
        if not isinstance(held, list) or len(held) != len(trained):
            return optimizer, f"the state of the optimizer {name}: tf_keras keeps no {attribute.strip('_')}"
        for slot, variable in zip(slots, ours, strict=True):
            slot.assign(held[places[id(variable)]].numpy())
    optimizer.iterations.assign(int(source.iterations.numpy()))
    return optimizer, ""


def _rebuilt(name: str, config: Mapping[str, Any], variables: Any) -> Any:
    settings = {key: value for key, value in config.items() if key not in _DROPPED}
    if isinstance(settings.get("learning_rate"), dict):
        settings["learning_rate"] = 0.0
    source = getattr(legacy.tf_keras().optimizers, name)(**settings)
    source.build(variables)
    return source


def _is_slots(held: Any, count: int) -> bool:
    return isinstance(held, list) and len(held) == count and all(isinstance(one, keras.Variable) for one in held)
