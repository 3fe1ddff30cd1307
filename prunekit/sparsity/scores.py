"""Weight (+ statistics) -> importance, one number per weight; higher = keep."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

_WORD = 0xFFFFFFFF


class Criterion(ABC):
    """How much each weight matters. Subclasses are frozen dataclasses whose call works eagerly and in a graph.

    `needs` names the statistics that a call is given; empty = weights only. There is one: "movement", of the weight's
    shape, the sum over optimizer updates of each weight's value times its change.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """The importance of each weight.

        Args:
            weight: Floating-point tensor of any shape.
            seed_offset: Tells weights of one model apart where scores are drawn at random.
            statistics: {name: tensor}, what `needs` names; None where it is empty.

        Returns:
            Floating-point tensor, the shape of `weight`; higher = keep. Above -inf, which marks what is pruned already.
        """


@dataclass(frozen=True)
class Magnitude(Criterion):
    """|w|, the L1 norm of each weight.

    Source: Han et al. 2015, arXiv:1506.02626, section 3.
    """

    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """|weight|, in the weight's own type."""
        return ops.abs(ops.convert_to_tensor(weight))


@dataclass(frozen=True)
class L2(Criterion):
    """w ** 2. Ranks single weights as `Magnitude` does, and blocks or channels by their mean square.

    Source: Li et al. 2017, arXiv:1608.08710, section 4.4 (L2 norm of filters).
    """

    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """weight ** 2, in float32, or float64 for a float64 weight."""
        weight = ops.convert_to_tensor(weight)
        # A 16-bit square is inf from 256 on and 0 below 0.0002.
        if keras.backend.standardize_dtype(weight.dtype) in ("float16", "bfloat16"):
            weight = ops.cast(weight, "float32")
        return ops.square(weight)


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform in [0, 1), blind to the weight: the baseline that every other criterion has to beat.

    Scores depend on seed, seed_offset and shape alone, to the last bit: not on the device, the backend, or XLA, and not
    on how often they were drawn. So the masks of a gradual schedule lie inside one another.

    Args:
        seed: Not negative.

    Source: Gale et al. 2019, arXiv:1902.09574, section 3 (random pruning). The bits come from hashing each position
        with two rounds of the 32-bit finaliser of MurmurHash3.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise TypeError(f"seed must be an int. Received: seed={self.seed!r} of type {type(self.seed).__name__}.")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative. Received: seed={self.seed}.")
        object.__setattr__(self, "seed", int(self.seed))

    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """Float32 scores, multiples of 2 ** -24 in [0, 1)."""
        shape = tuple(weight.shape)
        first, second = (int(key) for key in np.random.SeedSequence((self.seed, seed_offset)).generate_state(2))
        # keras.random draws other numbers inside a function compiled by XLA than outside it. Torch multiplies no
        # uint32, and TensorFlow multiplies int32 on the host even where the tensor is on a GPU.
        dtype = "int64" if keras.backend.backend() == "torch" else "uint32"
        position = ops.cast(ops.arange(int(np.prod(shape)), dtype="int32"), dtype)
        bits = _mixed(ops.bitwise_xor(_mixed(_plus(position, first)), ops.cast(np.int64(second), dtype)))
        # 24 bits, because a float32 holds no more.
        score = ops.cast(ops.right_shift(bits, ops.cast(8, dtype)), "float32") * (1.0 / (1 << 24))
        return ops.reshape(score, shape)


@dataclass(frozen=True)
class Movement(Criterion):
    """Sum over updates of w * (change of w): high where training drives a weight away from zero, low where towards it.

    A large weight that shrinks goes before a small one that grows: made for fine-tuning, where magnitudes are those of
    another task. It needs a training, and updates before the first mask; after an interruption the sum begins anew.

    Source: Sanh et al. 2020, arXiv:2005.07683, section 4, with the change that the optimizer really made (momentum,
        adaptive rates and decay included) in the place of -rate * gradient.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"movement"})

    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """statistics["movement"]."""
        return ops.convert_to_tensor(statistics["movement"])


@dataclass(frozen=True)
class Custom(Criterion):
    """A user's function: weight -> importance of the same shape, higher = keep.

    The function is traced into a graph, so it is made of `keras.ops`, not of NumPy.

    Args:
        function: Called with the weight as its only argument.
    """

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise TypeError(
                f"A criterion function takes a weight and returns its importance. Received: {self.function!r}."
            )

    def __call__(self, weight, *, seed_offset: int = 0, statistics: Any = None):
        """What the function returns, checked for shape and type; at least -2 ** 96, so that -inf means: goes first."""
        importance = ops.convert_to_tensor(self.function(weight))
        name = getattr(self.function, "__name__", repr(self.function))
        if tuple(importance.shape) != tuple(weight.shape):
            raise ValueError(
                f"A criterion function returns one importance per weight, so shape {tuple(weight.shape)}. "
                f"Received: shape {tuple(importance.shape)} from {name}."
            )
        dtype = keras.backend.standardize_dtype(importance.dtype)
        if "float" not in dtype:
            raise TypeError(
                f"A criterion function returns floating-point importances. Received: {dtype} from {name}. "
                'Convert them with keras.ops.cast(importance, "float32").'
            )
        if dtype in ("float16", "bfloat16"):
            importance = ops.cast(importance, "float32")
        # -inf marks a weight that is pruned already, and log|w| of a weight that is merely zero is -inf as well. The
        # average of a whole channel of these is still finite. Not ops.maximum: under XLA it forgets a NaN.
        least = ops.cast(-(2.0**96), importance.dtype)
        return ops.where(importance < least, least, importance)


CRITERIA: dict[str, type[Criterion]] = {
    "magnitude": Magnitude,
    "l1": Magnitude,
    "l2": L2,
    "movement": Movement,
    "random": Random,
}


def get_criterion(criterion: str | Callable[..., Any] | Criterion) -> Criterion:
    """The criterion that a name or a function stands for; a `Criterion` is returned as it is.

    Raises:
        ValueError: An unknown name.
        TypeError: Neither a name, nor a function, nor a criterion; a class instead of an instance.
    """
    if isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str):
        if criterion not in CRITERIA:
            near = difflib.get_close_matches(criterion.lower(), CRITERIA, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ValueError(
                f"Unknown criterion. Received: {criterion!r}. Valid are: {', '.join(CRITERIA)}, or a function "
                f"weight -> importance.{hint}"
            )
        return CRITERIA[criterion]()
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


def _plus(x, constant: int):
    """(x + constant) modulo 2 ** 32."""
    dtype = x.dtype
    return ops.bitwise_and(x + ops.cast(np.int64(constant), dtype), ops.cast(np.int64(_WORD), dtype))


def _times(x, constant: int):
    """(x * constant) modulo 2 ** 32; what overflows 64 bits lies above the word that is kept."""
    dtype = x.dtype
    return ops.bitwise_and(x * ops.cast(np.int64(constant), dtype), ops.cast(np.int64(_WORD), dtype))


def _mixed(x):
    """The finaliser of MurmurHash3: a bijection of 32-bit words in which every input bit moves every output bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = _times(ops.bitwise_xor(x, ops.right_shift(x, ops.cast(shift, x.dtype))), factor)
    return ops.bitwise_xor(x, ops.right_shift(x, ops.cast(16, x.dtype)))
