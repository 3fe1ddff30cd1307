"""Fingerprints of examples: 128 bits for each, calculated inside a compiled step on every backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime.backend import on_tensorflow

# 32-bit words of a fingerprint.
WORDS = 4
_SEED = 20_26
# Places by which the upper bits, in which floats differ, are added to the lower ones: a product moves bits up only.
_FOLD = 16
_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "int32")


def can_be_told_apart(inputs: Any) -> bool:
    """Returns True if `fingerprints` takes these inputs: numbers of up to 32 bits, of known shapes but for the batch.

    Args:
        inputs: Structure of tensors.
    """
    leaves = keras.tree.flatten(inputs)
    return bool(leaves) and all(_is_plain(leaf) for leaf in leaves)


def _is_plain(leaf: Any) -> bool:
    try:
        known = keras.backend.standardize_dtype(leaf.dtype) in (*_FLOATS, *_INTEGERS)
        return known and len(leaf.shape) > 0 and all(length is not None for length in leaf.shape[1:])
    except (ValueError, TypeError, AttributeError):
        # Texts, and tensors of ragged or unknown shape.
        return False


def fingerprints(inputs: Any) -> Any:
    """Returns the fingerprints of the examples of a batch, int32 tensor of shape (batch, 4).

    The upper half of each 32-bit number is added to its lower half by exclusive or, and the result multiplied by a
    random odd factor of its place, modulo 2^32; a word is the sum of these products, with other factors for each word.
    Two examples share a word with a probability of 2^-31 to 2^-16, the latter if they differ in signs alone, and all
    four with 2^-64 at most.

    Args:
        inputs: Structure of tensors for which `can_be_told_apart`.

    Source: Carter & Wegman 1979, Universal classes of hash functions (multilinear hashing).
    """
    parts = [ops.reshape(_bits(leaf), (-1, int(np.prod(leaf.shape[1:])))) for leaf in keras.tree.flatten(inputs)]
    words = parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=1)
    factors = place_factors(int(words.shape[1]))
    if on_tensorflow():
        return _on_tensorflow(words, factors)
    # `right_shift` fills with the sign, which would make some numbers equal.
    upper = ops.bitwise_and(ops.right_shift(words, np.int32(_FOLD)), np.int32(2**_FOLD - 1))
    folded = ops.bitwise_xor(words, upper)
    return ops.stack([ops.sum(folded * ops.convert_to_tensor(row), axis=1) for row in factors], axis=1)


def _on_tensorflow(words: Any, factors: np.ndarray) -> Any:
    """Returns the same in fewer operations: TensorFlow shifts unsigned numbers, and multiplies integer matrices."""
    import tensorflow as tf

    unsigned = tf.bitcast(words, tf.uint32)
    folded = tf.bitwise.bitwise_xor(unsigned, tf.bitwise.right_shift(unsigned, tf.constant(_FOLD, tf.uint32)))
    return tf.matmul(tf.bitcast(folded, tf.int32), tf.constant(factors), transpose_b=True)


def place_factors(places: int) -> np.ndarray:
    """Returns the random odd factors of places, int32, shape (4, places)."""
    drawn = np.random.default_rng(_SEED).integers(0, 2**32, (WORDS, places), dtype=np.uint32)
    return (drawn | np.uint32(1)).view("int32")


def _bits(leaf: Any) -> Any:
    if keras.backend.standardize_dtype(leaf.dtype) in _FLOATS:
        return ops.view(ops.cast(leaf, "float32"), "int32")
    return ops.cast(leaf, "int32")
