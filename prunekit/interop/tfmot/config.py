"""Rebuilds a legacy model's config from known classes: no name in a file decides what is imported or run."""

import functools
from collections.abc import Mapping
from typing import Any

import keras

from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.layers import ACTIVATIONS, SUPPORTED, reason_against

_MODELS = ("Sequential", "Functional", "Model")


def cleaned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a whole model in tf_keras's format, rebuilt from known classes.

    Raises:
        ValueError: The model has parts that cannot be carried; the message names all of them with reasons.
    """
    obstacles: list[str] = []
    result = _clean(config, obstacles, inside=False)
    if config.get("class_name") not in _MODELS:
        kind = config.get("class_name")
        obstacles = [f"{kind!r} (a subclassed model, whose code is in no file)"]
    if obstacles:
        raise ValueError(
            f"it has parts that cannot be converted to Keras 3: {', '.join(dict.fromkeys(obstacles))}. Build that "
            "part in Keras 3, and load the rest without it."
        )
    return result


@functools.cache
def _homes() -> dict[str, str]:
    """Returns {class name: module for tf_keras's lookup}; "" for classes of tensorflow-model-optimization."""
    homes = dict.fromkeys(legacy.wrapper_classes(), "")
    for home in ("initializers", "regularizers", "constraints"):
        names = (name for name in dir(getattr(keras, home)) if name[0].isupper())
        homes.update(dict.fromkeys(names, f"keras.{home}"))
    homes.update(dict.fromkeys(SUPPORTED, "keras.layers"))
    homes |= {"Sequential": "keras", "Functional": "keras.src.engine.functional", "Model": "keras"}
    homes["Policy"] = "keras.mixed_precision"
    return homes


def _clean(value: Any, obstacles: list[str], inside: bool) -> Any:
    """Returns `value` without the file's module names; `inside` is True for parts of a wrapped layer.

    Keeps `build_config` only for wrapped layers, which were built before their wrappers when the file was written.
    All other layers are built at their call: a wrapper that is built twice has its variables twice.
    """
    if isinstance(value, list):
        return [_clean(one, obstacles, inside) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("class_name"), str):
        return _clean_object(value, obstacles, inside)
    for key, one in value.items():
        if key.endswith("activation") and isinstance(one, str) and one not in ACTIVATIONS:
            obstacles.append(f"{str(value.get('name', key))!r} ({key} {one}: {reason_against(one)})")
    return {key: _clean(one, obstacles, inside or key == "layer") for key, one in value.items()}


def _clean_object(value: dict[str, Any], obstacles: list[str], inside: bool) -> Any:
    name, config = value["class_name"], value.get("config")
    if name in ("__tuple__", "TensorShape"):
        return [_clean(one, obstacles, inside) for one in value.get("items", [])]
    if name == "function":
        name = str(config)
        if name in ACTIVATIONS:
            return name
    home = _homes().get(name)
    if home is None:
        where = config.get("name") if isinstance(config, dict) else None
        obstacles.append(f"{str(where or name)!r} ({name}: {reason_against(name)})")
        return None
    result = {"class_name": name, "config": _clean(config, obstacles, inside=False)}
    if "module" in value:
        result |= {"module": home or None, "registered_name": None if home else name}
    for key in ("name", "inbound_nodes", "shared_object_id"):
        if key in value:
            result[key] = _clean(value[key], obstacles, inside=False)
    if inside and "build_config" in value:
        result["build_config"] = _clean(value["build_config"], obstacles, inside=False)
    return result
