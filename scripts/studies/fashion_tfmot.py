"""One training on Fashion-MNIST pruned by tensorflow-model-optimization, in a process of its own; prints JSON.

Usage: python -m studies.fashion_tfmot NETWORK SPARSITY SEED FREQUENCY [late]
"""

import json
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tf_keras
from tensorflow_model_optimization.sparsity import keras as sparsity

from studies import fashion


def main() -> None:
    """Trains and prints the measures of the stripped model."""
    name, final, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    tf_keras.utils.set_random_seed(seed)
    model = fashion.network(tf_keras, name, seed)
    begin, end, _ = fashion.SCHEDULE
    schedule = sparsity.PolynomialDecay(0.0, final, begin, end, frequency=int(sys.argv[4]))
    pruned = sparsity.prune_low_magnitude(model, pruning_schedule=schedule)
    fashion.compile_network(tf_keras, pruned)
    callbacks = [sparsity.UpdatePruningStep(), *([fashion.slow_last_epoch(tf_keras)] if sys.argv[5:] else [])]
    data = fashion.batches(fashion.images("train"), seed)
    pruned.fit(data, steps_per_epoch=fashion.STEPS, epochs=fashion.EPOCHS, verbose=0, callbacks=callbacks)
    print(json.dumps(fashion.measured(sparsity.strip_pruning(pruned), fashion.images("t10k"))))


if __name__ == "__main__":
    main()
