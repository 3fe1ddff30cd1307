"""Runs one LiteRT file and stores tensors from inside it, in a separate process, so that a crash ends only that one.

Run as a script: `python tensor_probe.py FILE INPUTS.npz OUTPUTS.npz INDEX...`. It imports nothing but NumPy and
ai-edge-litert, and nothing of prunekit.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def opened(path: str, inputs: Mapping[str, np.ndarray]) -> Any:
    """Returns an interpreter that keeps every tensor, ready for inputs of these shapes.

    It has the reference kernels, which round as the specification says. These have no depthwise convolution with
    weights of 4 bits: a file with one is run by the optimized kernels.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    for kernels in (OpResolverType.BUILTIN_REF, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
        try:
            interpreter = Interpreter(
                model_path=path, experimental_op_resolver_type=kernels, experimental_preserve_all_tensors=True
            )
            places = interpreter.get_signature_runner().get_input_details()
            # Before tensors are allocated: no window fits into the length 1 that a file has for an open axis.
            for name, values in inputs.items():
                interpreter.resize_tensor_input(places[name]["index"], values.shape)
            interpreter.allocate_tensors()
            return interpreter
        except (RuntimeError, ValueError):
            if kernels is not OpResolverType.BUILTIN_REF:
                raise
    return None


def main(arguments: list[str]) -> None:
    """Runs the file once on all examples of the inputs and stores the tensors of the given indices, by index."""
    path, source, target, *indices = arguments
    with np.load(source) as stored:
        inputs = {name: stored[name] for name in stored.files}
    interpreter = opened(path, inputs)
    interpreter.get_signature_runner()(**inputs)
    np.savez(target, allow_pickle=False, **{index: interpreter.get_tensor(int(index)) for index in indices})


if __name__ == "__main__":
    main(sys.argv[1:])
