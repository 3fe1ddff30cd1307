"""Runs one LiteRT file on given inputs in a separate process, so that a crash ends only that process.

Run as a script: `python probe.py FILE INPUTS.npz OUTPUTS.npz CHUNK...`. It imports nothing but NumPy and
ai-edge-litert, and nothing of prunekit, so it starts in about 0.2 s.
"""

import sys

import numpy as np


def run(path: str, inputs: dict[str, np.ndarray], chunk: int, count: int) -> dict[str, np.ndarray]:
    """Returns the file's outputs for the first `count` samples, run in batches of `chunk` samples.

    Args:
        path: A `.tflite` file with a signature.
        inputs: One array per input name, samples along axis 0.
        chunk: Samples per call.
        count: Number of samples to run.
    """
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(model_path=path).get_signature_runner()
    calls = [
        runner(**{name: values[start : min(start + chunk, count)] for name, values in inputs.items()})
        for start in range(0, count, chunk)
    ]
    return {name: np.concatenate([call[name] for call in calls]) for name in calls[0]}


def main(arguments: list[str]) -> None:
    """Runs the file once per `CHUNK:COUNT` and stores the outputs under `CHUNK/name`."""
    path, source, target, *runs = arguments
    with np.load(source) as stored:
        inputs = {name: stored[name] for name in stored.files}
    outputs: dict[str, np.ndarray] = {}
    for chunk, count in (map(int, text.split(":")) for text in runs):
        outputs |= {f"{chunk}/{name}": value for name, value in run(path, inputs, chunk, count).items()}
    np.savez(target, allow_pickle=False, **outputs)


if __name__ == "__main__":
    main(sys.argv[1:])
