"""A network for Fashion-MNIST compressed by tensorflow-model-optimization, in a process of its own; writes a file.

Zeros grow, clusters keep them, and integers keep both (PCQAT). Usage: python -m studies.pareto_tfmot NETWORK WEIGHTS
ZEROS CLUSTERS FILE, where WEIGHTS is a .npz file of the trained network's weights.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tensorflow_model_optimization as tfmot
import tf_keras
from tensorflow_model_optimization.python.core.clustering.keras.experimental import cluster as preserving
from tensorflow_model_optimization.python.core.quantization.keras.collab_opts.cluster_preserve import (
    default_8bit_cluster_preserve_quantize_scheme as scheme,
)

from studies import fashion

# Epochs of each of the three trainings, as many in all as ours have; their learning rates.
EPOCHS, RATES = 2, (1e-3, 1e-4, 1e-4)


def fitted(model: Any, rate: float, data: Any, callbacks: Any = ()) -> Any:
    """Trains with a learning rate that falls by half a cosine."""
    fashion.compile_falling(tf_keras, model, rate, EPOCHS * fashion.STEPS)
    model.fit(data, steps_per_epoch=fashion.STEPS, epochs=EPOCHS, verbose=0, callbacks=list(callbacks))
    return model


def main() -> None:
    """Compresses, and writes the integer file."""
    name, weights, zeros, clusters, file = sys.argv[1:]
    tf_keras.utils.set_random_seed(0)
    model = fashion.network(tf_keras, name, 0)
    with np.load(weights) as stored:
        model.set_weights([stored[key] for key in stored.files])
    train = fashion.images("train")
    data = fashion.batches(train, 1).repeat()
    end = EPOCHS * fashion.STEPS * 2 // 3
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, float(zeros), 0, end, frequency=10)
    pruned = tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule)
    fitted(pruned, RATES[0], data, [tfmot.sparsity.keras.UpdatePruningStep()])
    model = tfmot.sparsity.keras.strip_pruning(pruned)
    start = tfmot.clustering.keras.CentroidInitialization.KMEANS_PLUS_PLUS
    clustered = preserving.cluster_weights(
        model, number_of_clusters=int(clusters), cluster_centroids_init=start, preserve_sparsity=True
    )
    model = tfmot.clustering.keras.strip_clustering(fitted(clustered, RATES[1], data))
    annotated = tfmot.quantization.keras.quantize_annotate_model(model)
    quantized = tfmot.quantization.keras.quantize_apply(
        annotated, scheme.Default8BitClusterPreserveQuantizeScheme(preserve_sparsity=True)
    )
    fitted(quantized, RATES[2], data)
    converter = tf.lite.TFLiteConverter.from_keras_model(quantized)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    Path(file).write_bytes(converter.convert())


if __name__ == "__main__":
    main()
