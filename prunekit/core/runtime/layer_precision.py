"""The precision in which the layers of a model compute."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from prunekit.core.runtime import patching


@contextlib.contextmanager
def computing_in(dtype: str, layers: Iterable[Any]) -> Iterator[None]:
    """Context manager in which layers compute in `dtype`; their weights keep their dtypes.

    Functions that were traced before still compute as they did.
    """
    policy = keras.dtype_policies.DTypePolicy(dtype)
    with contextlib.ExitStack() as stack:
        for layer in {id(layer): layer for layer in layers}.values():
            stack.enter_context(patching.shadowed(layer, "_dtype_policy", policy))
        yield
