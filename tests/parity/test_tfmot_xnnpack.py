"""Which networks XNNPACK computes sparsely: the policy of tensorflow-model-optimization, and prunekit's check.

The policy looks at layers before anything is pruned; prunekit reads the converted file. Where they differ, prunekit's
answer is the one that LiteRT.js was measured to give (tests/operations/test_export.py has the measured networks).
"""

import keras
import numpy as np
import original
import pytest
import tf_keras
from backends import tensorflow_only

import prunekit as pk
from prunekit.delivery.litert import litert
from prunekit.delivery.litert.xnnpack import read_verdict

pytestmark = tensorflow_only
RUNS, DENSE, WRONG = "computed sparsely", "computed densely", "wrong numbers"


def network(library, middle, *, stem="padded", head="dense", sparsity=0.9):
    """A stem, two 1x1 convolutions with something between them, and global average pooling."""
    k = library.layers
    inputs = x = library.Input((16, 16, 3))
    if stem == "padded":
        x = k.Conv2D(8, 3, strides=2, activation="relu")(k.ZeroPadding2D(1)(x))
    elif stem == "same":
        x = k.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    else:
        x = k.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = k.Conv2D(16, 1, activation="relu", name="first")(x)
    x = middle(k, x)
    x = k.Conv2D(16, 1, name="last")(x)
    x = k.Flatten()(x) if head == "flatten" else k.GlobalAveragePooling2D()(x)
    model = library.Model(inputs, k.Dense(4)(x))
    if library is keras:
        names = [one.name for one in model.layers if isinstance(one, keras.layers.Conv2D) and one.kernel_size == (1, 1)]
        keras.utils.set_random_seed(1)
        pk.prune(model, sparsity, include=names, allocation="uniform")
    return model


def excitation(k, x):
    y = k.Conv2D(4, 1, activation="relu")(k.GlobalAveragePooling2D(keepdims=True)(x))
    return k.Multiply()([x, k.Conv2D(16, 1, activation="sigmoid")(y)])


def residual(k, x):
    return k.Add()([x, k.DepthwiseConv2D(3, padding="same")(x)])


def strided(k, x):
    return k.DepthwiseConv2D(3, strides=2)(k.ZeroPadding2D(1)(x))


# name -> (middle, options, whether the policy takes it, what prunekit says)
NETWORKS = {
    "depthwise 5x5": (lambda k, x: k.DepthwiseConv2D(5, padding="same")(x), {}, True, RUNS),
    "stride 2 after padding, normalised": (lambda k, x: k.BatchNormalization()(strided(k, x)), {}, True, RUNS),
    "residual": (residual, {}, True, RUNS),
    "squeeze and excitation": (excitation, {}, True, RUNS),
    "bilinear": (lambda k, x: k.UpSampling2D(interpolation="bilinear")(x), {}, True, RUNS),
    "stem without padding layer": (residual, {"stem": "same"}, False, DENSE),
    "stem without stride": (residual, {"stem": "plain"}, False, DENSE),
    "flattened": (residual, {"head": "flatten"}, False, DENSE),
    # Differences: the policy refuses what runs, and takes what does not.
    "swish": (lambda k, x: k.Activation("swish")(x), {}, False, RUNS),
    "max pooling": (lambda k, x: k.MaxPooling2D()(x), {}, False, WRONG),
    "inner 3x3": (lambda k, x: k.Conv2D(16, 3, padding="same")(x), {}, False, WRONG),
    "padding before 1x1": (lambda k, x: k.ZeroPadding2D(1)(x), {}, True, WRONG),
    "sparsity 0.64": (residual, {"sparsity": 0.64}, True, DENSE),
}


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("middle, options, policy_takes, own", NETWORKS.values(), ids=list(NETWORKS))
def test_the_verdicts_on_a_network(tmp_path, middle, options, policy_takes, own):
    policy = original.sparsity.PruneForLatencyOnXNNPack()
    old = network(tf_keras, middle, **options)
    if policy_takes:
        policy.ensure_model_supports_pruning(old)
    else:
        with pytest.raises(ValueError, match="not supported|Could not find"):
            policy.ensure_model_supports_pruning(old)
    new = network(keras, middle, **options)
    specs = litert.input_specs(new, np.zeros((1, 16, 16, 3)))
    content = litert.convert(litert.trace(new, np.zeros(1), specs, tmp_path), sparse=True)
    verdict = read_verdict(content)
    found = WRONG if verdict.wrong is not None else RUNS if verdict.switched else DENSE
    assert found == own, verdict


def test_the_policy_prunes_1x1_convolutions_and_include_says_the_same():
    old, new = (network(library, strided) for library in (tf_keras, keras))
    policy = original.sparsity.PruneForLatencyOnXNNPack()
    wrapped = original.sparsity.prune_low_magnitude(old, pruning_policy=policy)
    theirs = [layer.layer.name for layer in wrapped.layers if hasattr(layer, "prunable_weights")]
    assert theirs == ["first", "last"]
    report = pk.prune(new, 0.95, include=theirs, policy="tfmot")
    assert report.targets == ("first/kernel", "last/kernel")
