"""Times LiteRT files in turns in a separate process, on one thread.

Run as a script: `python stopwatch.py INPUTS.npz OUTPUT.npz SECONDS PRECISION FILE...`. It imports nothing but NumPy and
ai-edge-litert, and nothing of prunekit.
"""

import sys
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import numpy as np

# LiteRT on one thread computes in the calling thread. That thread's processor time is the latency without the pauses in
# which other programs run, but on Windows it counts in steps of 16 ms.
_clock = perf_counter if sys.platform == "win32" else thread_time
# Timed calls of each file in a turn, and least seconds of one: fast calls are timed several at once.
_CALLS, _LEAST_SECONDS = 10, 1e-3
# Of slow files a turn has fewer calls, so that it takes about so long.
_TURN_SECONDS = 0.5
_LEAST_TURNS, _LEAST_PRECISE_TURNS = 6, 15


def interval(values: np.ndarray) -> tuple[float, float]:
    """Returns bounds of the median with a confidence of about 95 %, from the order of at least 6 values."""
    ordered = np.sort(values)
    reach = 0.98 * np.sqrt(ordered.size)
    low = max(0, int((ordered.size - 1) / 2 - reach))
    return float(ordered[low]), float(ordered[ordered.size - 1 - low])


def times(paths: list[str], inputs: list[dict[str, np.ndarray]], seconds: float, precision: float) -> np.ndarray:
    """Returns median seconds of a call without pauses of the thread, shape (turns, files).

    Each turn opens the files anew, and calls them alternately: the place of an interpreter's tensors in memory changes
    its latency by several percent, and the speed of the machine changes from second to second.

    Args:
        paths: `.tflite` files with a signature.
        inputs: For each file one array per input name.
        seconds: Duration of all turns together; slow files take at least six turns.
        precision: Earlier end for several files: the half width of the interval of each file's share of the first one,
            divided by the share.
    """
    turns: list[np.ndarray] = []
    end = perf_counter() + seconds
    while len(turns) < _LEAST_TURNS or (perf_counter() < end and not _precise(np.array(turns), precision)):
        # Every other turn begins at the other end: no file always runs after the same one.
        order = list(range(len(paths)))[:: -1 if len(turns) % 2 else 1]
        runs = [_opened(paths[index], inputs[index]) for index in order]
        once = [min(_seconds(run) for _ in range(2)) for run in runs]
        repeats = [max(1, int(_LEAST_SECONDS / max(one, 1e-7))) for one in once]
        count = min(_CALLS, max(1, int(_TURN_SECONDS / max(np.dot(once, repeats), 1e-7))))
        calls = [[_seconds(run, each) for run, each in zip(runs, repeats, strict=True)] for _ in range(count)]
        found = np.empty(len(paths))
        found[order] = np.median(calls, axis=0)
        turns.append(found)
    return np.array(turns)


def _precise(turns: np.ndarray, precision: float) -> bool:
    if len(turns) < _LEAST_PRECISE_TURNS:
        return False
    shares = (turns[:, 1:] / turns[:, :1]).T
    return len(shares) > 0 and all(np.ptp(interval(one)) / 2 <= precision * np.median(one) for one in shares)


def _opened(path: str, inputs: dict[str, np.ndarray]) -> Callable[[], None]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=1)
    places = interpreter.get_signature_runner().get_input_details()
    if len(inputs) == len(places) == 1:
        # A resumed run's model may have another automatic name for its input than the model that wrote the file.
        inputs = dict(zip(places, inputs.values(), strict=True))
    for name, values in inputs.items():
        interpreter.resize_tensor_input(places[name]["index"], values.shape)
    interpreter.allocate_tensors()
    for name, values in inputs.items():
        interpreter.set_tensor(places[name]["index"], _as_read(values, places[name]))
    return interpreter.invoke


def _as_read(values: np.ndarray, place: dict[str, Any]) -> np.ndarray:
    """Returns floats as the codes that an input of integers reads; other values as they are."""
    scale, zero_point = place["quantization"]
    if not scale or values.dtype.kind != "f":
        return values
    ends = np.iinfo(place["dtype"])
    return np.clip(np.round(values / scale) + zero_point, ends.min, ends.max).astype(place["dtype"])


def _seconds(run: Callable[[], None], repeats: int = 1) -> float:
    start = _clock()
    for _ in range(repeats):
        run()
    return (_clock() - start) / repeats


def main(arguments: list[str]) -> None:
    """Times the files; inputs are stored as `FILE/name` with the number of the file."""
    source, target, seconds, precision, *paths = arguments
    with np.load(source) as stored:
        inputs = [
            {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{index}/")}
            for index in range(len(paths))
        ]
    np.savez(target, allow_pickle=False, seconds=times(paths, inputs, float(seconds), float(precision)))


if __name__ == "__main__":
    main(sys.argv[1:])
