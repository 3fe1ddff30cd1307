"""Options of a factorization, shared by `pk.factorize`, the recipe step and the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, get_args

from prunekit.sparsity.arguments import positive
from prunekit.sparsity.shorthands import TARGETS, LowRankForm
from prunekit.suggestions import did_you_mean

# Ranks of all weights, or by patterns.
Rank = int | Mapping[str, int | Literal["full"]]
FULL = "full"
FORMS = get_args(LowRankForm)


class FactorizeKeywords(TypedDict, total=False):
    """Types of the keyword options of `pk.factorize`; see `FactorizeOptions`."""

    form: LowRankForm
    correct_biases: bool
    tolerance: float | None
    include: Sequence[str] | str
    exclude: Sequence[str] | str


@dataclass(frozen=True)
class FactorizeOptions:
    """Which layers are factorized, and how.

    Args:
        form: Form of the convolutions: "channels" (the window to few channels, then 1 x 1), "separable" (k x 1, then
            1 x k), "tucker" (1 x 1 to few channels, the window on these, 1 x 1), or "auto": the one of the least error
            at its cost for each layer; with `rank`, "channels".
        correct_biases: True: factors are fitted to the deviations of a layer's outputs from their means, and its bias
            makes up for these.
        tolerance: Largest difference from the share of parameters, multiply-accumulates, bytes or latency, relative to
            the share, that is not refused; more than 2 % is noted. None takes the nearest model.
        include: Names, globs or `re:` patterns of layers and weights; empty = all kernels and tables.
        exclude: Patterns of those that stay as they are; overrides `include`.

    Raises:
        ValueError: An option has a value that is not listed here.
    """

    form: LowRankForm = "auto"
    correct_biases: bool = True
    tolerance: float | None = 0.1
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(
                f"`form` is one of {', '.join(FORMS)}. Received: {self.form!r}.{did_you_mean(str(self.form), FORMS)}"
            )
        if not isinstance(self.correct_biases, bool):
            raise ValueError(f"`correct_biases` is True or False. Received: {self.correct_biases!r}.")
        if self.tolerance is not None:
            positive("tolerance", self.tolerance)


@dataclass(frozen=True)
class RankTarget:
    """How small the layers become.

    Attributes:
        measure: One of `TARGETS`.
        value: The rank, or ranks by patterns; the share of the energy; or the share of a size that is left.
    """

    measure: str
    value: Any

    def __post_init__(self) -> None:
        if self.measure == "rank":
            _check_rank(self.value)
            return
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            raise TypeError(f"{self.measure} is a share, such as 0.5. Received: {self.value!r}.")
        share = float(self.value)
        if self.measure == "energy":
            if not 0 < share < 1:
                raise ValueError(
                    "energy is the share of the squared outputs of a layer that its factors keep, above 0 and below "
                    f"1. Received: {self.value!r}."
                )
        elif not 0 < share <= 1:
            hint = f" For {share:g} %, pass {share / 100:g}." if 1 < share <= 100 else ""
            raise ValueError(
                f"{self.measure} is the share that is left, in (0, 1]. Received: {self.measure}={self.value}.{hint}"
            )

    @property
    def patterns(self) -> Mapping[str, int | None]:
        """Ranks by patterns of layers and weights, None = as it is; others have `rank`."""
        given = self.value if isinstance(self.value, Mapping) else {}
        return {pattern: None if rank == FULL else int(rank) for pattern, rank in given.items()}

    @property
    def rank(self) -> int | None:
        """Rank of the weights that no pattern matches; None = as they are."""
        return None if isinstance(self.value, Mapping) else int(self.value)


def target_of(given: Mapping[str, Any]) -> RankTarget:
    """Returns the one target that is not None.

    Raises:
        ValueError: None is given, or several; or it has a wrong value.
        TypeError: It is of another type.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) != 1:
        raise ValueError(
            f"One target says how small the layers become: {', '.join(TARGETS)}. Received: "
            f"{', '.join(asked) or 'none'}. Pass exactly one, such as parameters=0.5, the share that is left."
        )
    return RankTarget(*asked.popitem())


def _check_rank(value: Any) -> None:
    if isinstance(value, Mapping):
        if not value or not all(isinstance(pattern, str) for pattern in value):
            raise ValueError(
                f"`rank` by patterns names layers or weights with their ranks, {{'head': 16}}. Received: {value!r}."
            )
        for pattern, rank in value.items():
            if rank != FULL:
                _check_number(rank, f"`rank[{pattern!r}]`", ', or "full"')
    else:
        _check_number(value, "`rank`", ", or ranks by patterns, {'head': 16, 'block_*': 'full'}")


def _check_number(rank: Any, name: str, others: str) -> None:
    known = isinstance(rank, Integral) and not isinstance(rank, bool)
    if not known or rank < 1:
        raise (ValueError if known else TypeError)(
            f"{name} is the number of values between the two layers, an int from 1{others}. Received: {rank!r}."
        )
