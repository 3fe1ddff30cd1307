"""Times LiteRT files in a separate process: one thread, the files in turn.

Run as a script: `python stopwatch.py INPUTS.npz OUTPUT.json SECONDS FILE...`. It imports nothing but NumPy and
ai-edge-litert, and nothing of prunekit.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

# Duration of one measurement in seconds: long for the clock's resolution, and so short that another program, which
# takes the processor for milliseconds, meets a few measurements and not the median.
_SLICE = 0.0005
# Smallest and largest number of rounds.
_ROUNDS = (5, 1001)


def prepared(path: str, inputs: dict[str, np.ndarray]) -> tuple[Any, int]:
    """Returns an interpreter whose inputs are set, and the number of examples in a call.

    Args:
        path: A `.tflite` file with a signature.
        inputs: Arrays by input name, examples along axis 0.
    """
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=1)
    details = interpreter.get_signature_runner().get_input_details()
    batch = 1
    for name, detail in details.items():
        declared = detail["shape_signature"]
        batch = int(declared[0]) if len(declared) and declared[0] > 0 else 1
        # np.resize repeats the examples where the file takes more than there are.
        values = np.resize(inputs[name], (batch, *inputs[name].shape[1:]))
        inputs = inputs | {name: values}
        interpreter.resize_tensor_input(detail["index"], values.shape)
    interpreter.allocate_tensors()
    for name, detail in details.items():
        interpreter.set_tensor(detail["index"], inputs[name])
    return interpreter, batch


def timed(interpreter: Any, calls: int) -> float:
    """Returns the mean duration of a call, in seconds, after a call that fills the caches."""
    interpreter.invoke()
    began = time.perf_counter()
    for _ in range(calls):
        interpreter.invoke()
    return (time.perf_counter() - began) / calls


def measured(paths: list[str], inputs: dict[str, np.ndarray], seconds: float) -> dict[str, Any]:
    """Returns the median duration of a call of each file, in seconds, with the number of rounds and the batch sizes.

    Each round times each file once, so that a change of the machine's speed meets all files alike.

    Args:
        paths: LiteRT files with the same inputs.
        inputs: Arrays by input name, examples along axis 0.
        seconds: Duration of all rounds together; slow files take at least five rounds.
    """
    files = [prepared(path, inputs) for path in paths]
    first = [min(timed(interpreter, 1) for _ in range(3)) for interpreter, _ in files]
    calls = [max(1, round(_SLICE / max(one, 1e-7))) for one in first]
    whole = sum((number + 1) * one for number, one in zip(calls, first, strict=True))
    rounds = min(_ROUNDS[1], max(_ROUNDS[0], round(seconds / whole)))
    durations: list[list[float]] = [[] for _ in files]
    for number in range(rounds):
        # Every other round begins at the other end: no file always runs after the same one.
        order = range(len(files)) if number % 2 else reversed(range(len(files)))
        for index in order:
            durations[index].append(timed(files[index][0], calls[index]))
    return {
        "seconds": [statistics.median(found) for found in durations],
        "rounds": rounds,
        "batch": [batch for _, batch in files],
    }


def main(arguments: list[str]) -> None:
    """Times the files, and writes the result as JSON."""
    source, target, seconds, *paths = arguments
    with np.load(source) as stored:
        inputs = {name: stored[name] for name in stored.files}
    with open(target, "w", encoding="utf-8") as file:
        json.dump(measured(paths, inputs, float(seconds)), file)


if __name__ == "__main__":
    main(sys.argv[1:])
