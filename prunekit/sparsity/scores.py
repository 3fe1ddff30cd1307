"""Pruning criteria: functions weight (+ statistics) -> importance, one number per weight; higher = keep."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.shorthands import CRITERIA

_WORD = 0xFFFFFFFF


class Criterion(ABC):
    """Computes the importance of each weight. Subclasses are frozen dataclasses, callable eagerly and in a graph.

    Register a subclass by a row in `CRITERIA` to use its name in options and recipes.

    Attributes:
        needs: Names of the required statistics, as registered in `prunekit.sparsity.shorthands.STATISTICS`; empty =
            weights only.
        reconstructs: True for a criterion that also sets the kept weights, by a method `fitted`.
        before_training: True for a criterion of untrained networks, whose outputs need no repair.
        rounds: Number of rounds in which a mask update prunes, each with new statistics; see `sparsities_of_rounds`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    reconstructs: ClassVar[bool] = False
    before_training: ClassVar[bool] = False
    rounds: int = 1

    @abstractmethod
    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """The importance of each weight.

        Args:
            weight: Floating-point tensor of any shape.
            target: `prunekit.anatomy.layers.targets.Target` of the weight, with its input and output axes; None where a
                caller has only the array.
            seed_offset: Integer that differs between the weights of a model, for criteria that draw random scores.
            statistics: {name: value for this weight} for each name in `needs`; None if `needs` is empty.

        Returns:
            Floating-point tensor, the shape of `weight`; higher = keep. All entries are above -inf, because -inf marks
            weights that are already pruned.
        """


@dataclass(frozen=True)
class Magnitude(Criterion):
    """|w|, the L1 norm of each weight.

    Source: Han et al. 2015, arXiv:1506.02626, section 3.
    """

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """|weight|, in the weight's own type."""
        return ops.abs(ops.convert_to_tensor(weight))


@dataclass(frozen=True)
class L2(Criterion):
    """w ** 2. Ranks single weights in the same order as `Magnitude`, and blocks or channels by their mean square.

    Source: Li et al. 2017, arXiv:1608.08710, section 4.4 (L2 norm of filters).
    """

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """weight ** 2, in float32, or float64 for a float64 weight."""
        # In float16 the square overflows to inf from |w| = 256 on and underflows to 0 below 0.0002.
        return ops.square(wide(weight))


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random scores in [0, 1), independent of the weight's values: the baseline for all other criteria.

    Scores depend only on seed, seed_offset and shape and are bit-identical across devices, backends, XLA and repeated
    calls. The masks of a gradual schedule are therefore nested: a pruned weight stays pruned.

    Args:
        seed: Non-negative integer.

    Source: Gale et al. 2019, arXiv:1902.09574, section 3 (random pruning). The bits come from hashing each position
        with two rounds of the 32-bit finaliser of MurmurHash3.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, largest=None))

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """Float32 scores, multiples of 2 ** -24 in [0, 1)."""
        shape = tuple(weight.shape)
        first, second = (int(key) for key in np.random.SeedSequence((self.seed, seed_offset)).generate_state(2))
        # keras.random draws different numbers inside and outside a function compiled by XLA. PyTorch cannot multiply
        # uint32, and TensorFlow multiplies int32 on the host even if the tensor is on a GPU.
        dtype = "int64" if keras.backend.backend() == "torch" else "uint32"
        position = ops.cast(ops.arange(int(np.prod(shape)), dtype="int32"), dtype)
        bits = _mixed(ops.bitwise_xor(_mixed(_plus(position, first)), ops.cast(np.int64(second), dtype)))
        # 24 bits: the precision of float32.
        score = ops.cast(ops.right_shift(bits, ops.cast(8, dtype)), "float32") * (1.0 / (1 << 24))
        return ops.reshape(score, shape)


@dataclass(frozen=True)
class Movement(Criterion):
    """Sum over updates of w * (change of w): high if training moves a weight away from zero, low if towards zero.

    A large weight that shrinks is pruned before a small weight that grows. Intended for fine-tuning, where magnitudes
    reflect the pretraining task. The criterion needs a training with optimizer updates before the first mask update;
    the sum restarts at 0 after an interruption.

    Source: Sanh et al. 2020, arXiv:2005.07683, section 4, with the optimizer's actual change of the weight (including
        momentum, adaptive rates and decay) instead of -rate * gradient.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"movement"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """statistics["movement"], as a tensor."""
        return ops.convert_to_tensor(statistics["movement"])


@dataclass(frozen=True)
class Wanda(Criterion):
    """|w_ij| * ||x_i||_2: weight times the norm of the input that it multiplies, over the calibration inputs.

    Args:
        per_output: True ranks the weights of each output among themselves, so that a uniform sparsity removes the same
            fraction of each: the score is the rank divided by the number of inputs. False compares the products
            themselves over the whole weight, as allocations over several weights need.

    Source: Sun et al. 2023, arXiv:2306.11695, eq. 1 and section 3 (comparison group: one output).
    """

    per_output: bool = True

    needs: ClassVar[frozenset[str]] = frozenset({"input_norm"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """Float32 importances, the shape of `weight`."""
        norm = ops.convert_to_tensor(statistics["input_norm"])
        importance = ops.abs(ops.cast(weight, norm.dtype)) * norm
        outputs = () if target is None else target.out_axes
        inputs = tuple(axis for axis in range(len(weight.shape)) if axis not in outputs)
        if not self.per_output or not inputs:
            return importance
        columns = ops.transpose(importance, (*inputs, *outputs))
        shape = columns.shape
        count = math.prod(shape[: len(inputs)])
        # Both lengths: a weight without entries leaves -1 undefined.
        columns = ops.reshape(columns, (count, math.prod(shape[len(inputs) :])))
        # Of equal products the lower index is kept first: the reversed order is sorted stably.
        order = ops.argsort(ops.flip(columns, axis=0), axis=0)
        ranks = ops.argsort(count - 1 - order, axis=0)
        ranks = ops.reshape(ops.cast(ranks, "float32") * (1.0 / max(count, 1)), shape)
        return ops.transpose(ranks, tuple(int(axis) for axis in np.argsort((*inputs, *outputs))))


@dataclass(frozen=True)
class Custom(Criterion):
    """Importance from a user's function: weight -> importance of the same shape, higher = keep.

    The function is traced into a graph, so its operations must be `keras.ops`, not NumPy. A function with parameters
    named `target`, `seed_offset` or `statistics` is given these as keywords, as `Criterion.__call__` describes them.
    The attribute `needs` of the function, a collection of names, selects the statistics: `score.needs = ("gradient",)`.

    Args:
        function: Called with the weight, and with the keywords above that it names.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise TypeError(
                f"A criterion function must take a weight and return its importance. Received: {self.function!r}."
            )
        needs = getattr(self.function, "needs", ())
        if isinstance(needs, str) or not isinstance(needs, Collection):
            raise TypeError(
                "The attribute `needs` of a criterion function is a collection of names of statistics. "
                f"Received: {needs!r}."
            )
        if needs and "statistics" not in self.keywords:
            raise TypeError(
                "A criterion function that needs statistics takes them as the parameter `statistics`. "
                f"Received: {self.function!r} with needs={needs!r} and no such parameter."
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the statistics that the function needs."""
        return frozenset(getattr(self.function, "needs", ()))

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keyword arguments of `__call__` that the function takes."""
        try:
            known = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # functions written in C have no signature
            return ()
        # The first parameter is the weight, whatever its name is.
        return tuple(name for name in list(known)[1:] if name in ("target", "seed_offset", "statistics"))

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """The function's checked return value; entries below -2 ** 96, such as -inf, are raised to -2 ** 96."""
        given = {"target": target, "seed_offset": seed_offset, "statistics": statistics}
        importance = ops.convert_to_tensor(self.function(weight, **{name: given[name] for name in self.keywords}))
        name = getattr(self.function, "__name__", repr(self.function))
        if tuple(importance.shape) != tuple(weight.shape):
            raise ValueError(
                f"A criterion function must return one importance per entry, so shape {tuple(weight.shape)}. "
                f"Received: shape {tuple(importance.shape)} from {name}."
            )
        dtype = keras.backend.standardize_dtype(importance.dtype)
        if "float" not in dtype:
            raise TypeError(
                f"A criterion function must return floating-point importances. Received: {dtype} from {name}. "
                'Convert them with keras.ops.cast(importance, "float32").'
            )
        if dtype in ("float16", "bfloat16"):
            importance = ops.cast(importance, "float32")
        # -inf marks a weight that is already pruned, but log|w| of a zero weight that is not pruned is -inf too.
        # -2 ** 96: the sum over a whole channel stays finite. ops.where, because ops.maximum drops NaN under XLA.
        least = ops.cast(-(2.0**96), importance.dtype)
        return ops.where(importance < least, least, importance)


def get_criterion(criterion: str | Callable[..., Any] | Criterion) -> Criterion:
    """Returns the criterion for a name or a user's function; returns a `Criterion` unchanged.

    Raises:
        ValueError: `criterion` is an unknown name.
        TypeError: `criterion` is not a name, a function or a `Criterion` instance (a class is not an instance).
    """
    if isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str):
        return CRITERIA.named(criterion, ", or a function weight -> importance").load()()
    if isinstance(criterion, type) and issubclass(criterion, Criterion):
        raise TypeError(
            f"Expected a criterion, not its class. Received: {criterion.__name__}. Pass {criterion.__name__}()."
        )
    if isinstance(criterion, type) or not callable(criterion):
        raise TypeError(
            f"A criterion is one of {', '.join(CRITERIA)}, a function weight -> importance, or a Criterion. "
            f"Received: {criterion!r} of type {type(criterion).__name__}."
        )
    return Custom(criterion)


def sparsities_of_rounds(current: float, final: float, rounds: int) -> list[float]:
    """Returns the sparsity after each round: the density falls by the same factor in every round.

    Args:
        current: Sparsity before the first round.
        final: Sparsity after the last round; with `final` <= `current` there is one round.
        rounds: Number of rounds.

    Source: Tanaka et al. 2020, arXiv:2006.05467, algorithm 1.

    >>> sparsities_of_rounds(0.0, 0.75, 2)
    [0.5, 0.75]
    """
    if final <= current:
        return [final]
    density = [(1 - current) ** (1 - k / rounds) * (1 - final) ** (k / rounds) for k in range(1, rounds)]
    return [*(1 - kept for kept in density), final]


def wide(weight):
    """Returns the weight as a tensor, cast to float32 from a 16-bit type."""
    weight = ops.convert_to_tensor(weight)
    narrow = keras.backend.standardize_dtype(weight.dtype) in ("float16", "bfloat16")
    return ops.cast(weight, "float32") if narrow else weight


def _plus(x, constant: int):
    """(x + constant) modulo 2 ** 32."""
    dtype = x.dtype
    return ops.bitwise_and(x + ops.cast(np.int64(constant), dtype), ops.cast(np.int64(_WORD), dtype))


def _times(x, constant: int):
    """(x * constant) modulo 2 ** 32; an overflow of 64 bits does not affect the lowest 32 bits."""
    dtype = x.dtype
    return ops.bitwise_and(x * ops.cast(np.int64(constant), dtype), ops.cast(np.int64(_WORD), dtype))


def _mixed(x):
    """The finaliser of MurmurHash3: a bijection of 32-bit words in which every input bit moves every output bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = _times(ops.bitwise_xor(x, ops.right_shift(x, ops.cast(shift, x.dtype))), factor)
    return ops.bitwise_xor(x, ops.right_shift(x, ops.cast(16, x.dtype)))
