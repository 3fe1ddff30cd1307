"""Sparsity schedules: functions step -> sparsity, in plain Python. The module imports no NumPy, Keras or TensorFlow.

A step is one optimizer update. Step 0 is before training: a mask update at step 0 runs before the first optimizer step.
"""

import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from prunekit.sparsity.arguments import LARGEST, fraction, positive, whole
from prunekit.sparsity.shorthands import SCHEDULE_SOURCES


class Schedule(ABC):
    """The target sparsity at each step, and the steps at which masks are recomputed (the update steps).

    Subclasses are frozen dataclasses. They define `begin_step`, `final_sparsity`, `final_step`, `last_update`,
    `frequency` and `_sparsity`; `fitted` and `is_open` where their steps may follow from the length of a training. The
    update steps are begin_step, begin_step + frequency, ..., and always `last_update`, even if `frequency` does not
    divide last_update - begin_step.
    """

    @property
    @abstractmethod
    def begin_step(self) -> int:
        """The first update step; the sparsity is 0 before it."""

    @property
    @abstractmethod
    def final_sparsity(self) -> float:
        """The sparsity from `final_step` on, in [0, 1)."""

    @property
    @abstractmethod
    def final_step(self) -> int:
        """The first step at which the final sparsity holds; always an update step."""

    @property
    @abstractmethod
    def last_update(self) -> int | None:
        """The last update step; None if updates never end."""

    @property
    @abstractmethod
    def frequency(self) -> int:
        """Number of steps between two updates."""

    @abstractmethod
    def _sparsity(self, step: int) -> float:
        """The sparsity at a step in [begin_step, final_step)."""

    @property
    def is_open(self) -> bool:
        """Whether the steps are unknown until `fitted` is told the length of the training."""
        return False

    def fitted(self, steps: int | None) -> "Schedule":
        """Returns the schedule for a training of `steps` optimizer updates; unchanged if all of its steps are given.

        Raises:
            ValueError: The schedule is open, and `steps` is None: nobody knows the length of the training.
        """
        return self

    def __call__(self, step: int) -> float:
        """The target sparsity at `step`: 0 before `begin_step`, exactly `final_sparsity` from `final_step` on."""
        step = operator.index(step)
        if step < self.begin_step:
            return 0.0
        if step >= self.final_step:
            return self.final_sparsity
        return self._sparsity(step)

    def latest_update(self, step: int) -> int | None:
        """The largest update step <= `step`; None before the first update step. Runs in constant time."""
        step = operator.index(step)
        if step < self.begin_step:
            return None
        if self.last_update is not None and step >= self.last_update:
            return self.last_update
        return step - (step - self.begin_step) % self.frequency

    def update_steps(self, steps: int) -> list[int]:
        """All update steps in [0, steps], in ascending order, for a training of `steps` optimizer updates."""
        steps = whole("steps", steps, minimum=0)
        if self.last_update is None or steps < self.last_update:
            return list(range(self.begin_step, steps + 1, self.frequency))
        return [*range(self.begin_step, self.last_update, self.frequency), self.last_update]


# What trainings take whose schedule has no `end_step` and no `frequency`: docs/measured/schedules.md.
_END, _UPDATES = 0.75, 60


@dataclass(frozen=True)
class _Decay(Schedule):
    """Raises the sparsity from `initial_sparsity` at `begin_step` to `final_sparsity` at `end_step`.

    Each subclass declares the field `frequency` itself, because `power` precedes `frequency` in PolynomialDecay.
    """

    initial_sparsity: float = 0.0
    final_sparsity: float = 0.8
    begin_step: int = 0
    end_step: int | None = None

    def __post_init__(self) -> None:
        _set(self, "initial_sparsity", fraction("initial_sparsity", self.initial_sparsity))
        _set(self, "final_sparsity", fraction("final_sparsity", self.final_sparsity))
        _set(self, "begin_step", whole("begin_step", self.begin_step, minimum=0))
        if self.frequency is not None:
            _set(self, "frequency", whole("frequency", self.frequency, minimum=1))
        if self.initial_sparsity > self.final_sparsity:
            raise ValueError(
                "A schedule never restores pruned weights, so it needs initial_sparsity <= final_sparsity. "
                f"Received: initial_sparsity={self.initial_sparsity}, final_sparsity={self.final_sparsity}. To end at "
                f"{self.initial_sparsity:g}, pass final_sparsity={self.initial_sparsity:g}: the first argument is the "
                "initial sparsity."
            )
        if self.end_step is not None:
            _set(self, "end_step", whole("end_step", self.end_step, minimum=0))
            _check_order(self.begin_step, self.end_step)
            if self.frequency is None:
                _set(self, "frequency", max(1, (self.end_step - self.begin_step) // _UPDATES))

    @property
    def is_open(self) -> bool:
        """Whether there is no `end_step` yet."""
        return self.end_step is None

    def fitted(self, steps: int | None) -> Schedule:
        """Returns the schedule with an `end_step` after three quarters of the updates that follow `begin_step`."""
        if self.end_step is not None:
            return self
        if steps is None:
            raise self._of_unknown_end()
        left = max(whole("steps", steps, minimum=0) - self.begin_step, 0)
        return replace(self, end_step=self.begin_step + round(_END * left))

    @property
    def final_step(self) -> int:
        """`end_step`; `begin_step` if the initial sparsity equals the final sparsity."""
        return self.last_update if self.initial_sparsity < self.final_sparsity else self.begin_step

    @property
    def last_update(self) -> int:
        """`end_step`, for every frequency."""
        if self.end_step is None:
            raise self._of_unknown_end()
        return self.end_step

    def _of_unknown_end(self) -> ValueError:
        name, final = type(self).__name__, f"{self.final_sparsity:g}"
        return ValueError(
            "A schedule without `end_step` takes it from the length of the training, which is not known here. "
            f"Received: a {name} to {final} without end_step. Pass pk.schedules.{name}(final_sparsity={final}, "
            f"end_step=STEPS), or pk.schedules.ConstantSparsity({final}) for this sparsity from the start; with `fit`, "
            "steps_per_epoch is enough."
        )

    @abstractmethod
    def _rise(self, progress: float) -> float:
        """The fraction, in [0, 1], of the rise from initial to final sparsity completed at `progress` in [0, 1]."""

    def _sparsity(self, step: int) -> float:
        progress = (step - self.begin_step) / (self.last_update - self.begin_step)
        # Computed upwards from the initial sparsity: rounding then keeps that value exact and the sequence monotonic.
        sparsity = self.initial_sparsity + (self.final_sparsity - self.initial_sparsity) * self._rise(progress)
        return min(sparsity, self.final_sparsity)


@dataclass(frozen=True)
class PolynomialDecay(_Decay):
    """final + (initial - final) * (1 - p) ** power, with p = (step - begin_step) / (end_step - begin_step).

    Args:
        initial_sparsity: Sparsity at `begin_step`, in [0, 1).
        final_sparsity: Sparsity from `end_step` on, in [initial_sparsity, 1).
        begin_step: First update step.
        end_step: Last update step. If equal to `begin_step`, the sparsity is `final_sparsity` from that step on. None:
            after three quarters of the training's updates, which a `PruningCallback` and a recipe know; elsewhere, call
            `fitted`.
        power: Exponent, more than 0. 3 prunes fast at first and slowly towards the end; 1 equals `LinearDecay`.
        frequency: Steps between updates. `end_step` is an update step even if `frequency` does not divide the length.
            None: about 60 updates.

    Source: Zhu & Gupta 2017, arXiv:1710.01878, eq. 1 (there with power 3).
    """

    power: float = 3
    frequency: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "power", positive("power", self.power))

    def _rise(self, progress: float) -> float:
        return 1.0 - (1.0 - progress) ** self.power


@dataclass(frozen=True)
class LinearDecay(_Decay):
    """initial + (final - initial) * p, with p = (step - begin_step) / (end_step - begin_step).

    The fields are the fields of `PolynomialDecay` without `power`.

    Source: Zhu & Gupta 2017, arXiv:1710.01878, eq. 1 with exponent 1.
    """

    frequency: int | None = None  # type: ignore[assignment]

    def _rise(self, progress: float) -> float:
        return progress


@dataclass(frozen=True)
class CosineDecay(_Decay):
    """final + (initial - final) * (1 + cos(pi p)) / 2: rises slowly at both ends and fastest at p = 1/2.

    p = (step - begin_step) / (end_step - begin_step).

    The fields are the fields of `PolynomialDecay` without `power`.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5 (cosine annealing), without restarts, for the sparsity.
    """

    frequency: int | None = None  # type: ignore[assignment]

    def _rise(self, progress: float) -> float:
        # sin^2(pi p / 2) equals (1 - cos(pi p)) / 2 but avoids the cancellation near p = 0.
        return math.sin(0.5 * math.pi * progress) ** 2


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """1 - (1 - initial) ** (1 - p) * (1 - final) ** p: the density falls by the same factor in every step.

    p = (step - begin_step) / (end_step - begin_step).

    The fields are the fields of `PolynomialDecay` without `power`.

    Source: the fixed fraction of the remaining weights removed per round in Frankle & Carbin 2019, arXiv:1803.03635,
        section 1, as a function of the step.
    """

    frequency: int | None = None  # type: ignore[assignment]

    def _rise(self, progress: float) -> float:
        # log1p, because the difference of two logarithms is 0 for neighbouring sparsities: a division by zero below.
        log_ratio = math.log1p((self.initial_sparsity - self.final_sparsity) / (1.0 - self.initial_sparsity))
        return math.expm1(progress * log_ratio) / math.expm1(log_ratio)


@dataclass(frozen=True)
class ConstantSparsity(Schedule):
    """Sparsity `target_sparsity` from `begin_step` on, and 0 before.

    Args:
        target_sparsity: Sparsity, in [0, 1).
        begin_step: First update step; the sparsity is `target_sparsity` from this step on.
        end_step: Last update step; masks do not change after this step. -1: updates never end.
        frequency: Steps between updates.

    Source: ConstantSparsity of tensorflow-model-optimization 0.8.
    """

    target_sparsity: float = 0.5
    begin_step: int = 0
    end_step: int = -1
    frequency: int = 100

    def __post_init__(self) -> None:
        _set(self, "target_sparsity", fraction("target_sparsity", self.target_sparsity))
        _set(self, "begin_step", whole("begin_step", self.begin_step, minimum=0))
        _set(self, "end_step", whole("end_step", self.end_step, minimum=-1))
        _set(self, "frequency", whole("frequency", self.frequency, minimum=1))
        if self.end_step != -1:
            _check_order(self.begin_step, self.end_step, remedy=" Pass end_step=-1 for updates without end.")

    @property
    def final_sparsity(self) -> float:
        """`target_sparsity`."""
        return self.target_sparsity

    @property
    def final_step(self) -> int:
        """`begin_step`."""
        return self.begin_step

    @property
    def last_update(self) -> int | None:
        """`end_step`; None if `end_step` is -1."""
        return None if self.end_step == -1 else self.end_step

    def _sparsity(self, step: int) -> float:
        return self.target_sparsity


@dataclass(frozen=True)
class OneShot(Schedule):
    """Sparsity 0 before `step` and `sparsity` from `step` on: a single mask update.

    Args:
        sparsity: Sparsity, in [0, 1).
        step: The update step.

    Source: one-shot magnitude pruning, Han et al. 2015, arXiv:1506.02626, section 3.
    """

    sparsity: float = 0.5
    step: int = 0

    def __post_init__(self) -> None:
        _set(self, "sparsity", fraction("sparsity", self.sparsity))
        _set(self, "step", whole("step", self.step, minimum=0))

    @property
    def begin_step(self) -> int:
        """`step`."""
        return self.step

    @property
    def final_sparsity(self) -> float:
        """`sparsity`."""
        return self.sparsity

    @property
    def final_step(self) -> int:
        """`step`."""
        return self.step

    @property
    def last_update(self) -> int:
        """`step`."""
        return self.step

    @property
    def frequency(self) -> int:
        """1; unused, because the schedule has one update."""
        return 1

    def _sparsity(self, step: int) -> float:
        return self.sparsity


@dataclass(frozen=True)
class MultiStep(Schedule):
    """The sparsity of the last (step, sparsity) pair whose step is reached; 0 before the first pair.

    Args:
        sparsities: Pairs (step, sparsity); steps and sparsities are strictly increasing. Stored as a tuple of tuples.

    Source: the rounds of prune and retrain of Han et al. 2015, arXiv:1506.02626, section 3.3.
    """

    sparsities: tuple[tuple[int, float], ...] = ((100, 0.3), (200, 0.5))

    def __post_init__(self) -> None:
        _set(self, "sparsities", tuple(_pair(i, pair) for i, pair in enumerate(_sequence(self.sparsities))))
        if not self.sparsities:
            raise ValueError("MultiStep needs at least one (step, sparsity) pair. Received: sparsities=().")
        for earlier, later in zip(self.sparsities, self.sparsities[1:], strict=False):
            if not (earlier[0] < later[0] and earlier[1] < later[1]):
                raise ValueError(
                    "MultiStep needs steps and sparsities that both rise from pair to pair. "
                    f"Received: {earlier} followed by {later}."
                )

    @property
    def begin_step(self) -> int:
        """The step of the first pair."""
        return self.sparsities[0][0]

    @property
    def final_sparsity(self) -> float:
        """The sparsity of the last pair."""
        return self.sparsities[-1][1]

    @property
    def final_step(self) -> int:
        """The step of the last pair."""
        return self.sparsities[-1][0]

    @property
    def last_update(self) -> int:
        """The step of the last pair."""
        return self.sparsities[-1][0]

    @property
    def frequency(self) -> int:
        """The smallest number of steps between two updates; 1 if there is only one update."""
        return min((b[0] - a[0] for a, b in zip(self.sparsities, self.sparsities[1:], strict=False)), default=1)

    def latest_update(self, step: int) -> int | None:
        """The largest update step <= `step`; None before the first update step."""
        reached = self._reached(operator.index(step))
        return self.sparsities[reached - 1][0] if reached else None

    def update_steps(self, steps: int) -> list[int]:
        """The pairs' steps that are <= `steps`, the number of optimizer updates of a training."""
        return [step for step, _ in self.sparsities[: self._reached(whole("steps", steps, minimum=0))]]

    def _reached(self, step: int) -> int:
        return bisect_right(self.sparsities, step, key=operator.itemgetter(0))

    def _sparsity(self, step: int) -> float:
        return self.sparsities[self._reached(step) - 1][1]


SCHEDULES: dict[str, type[Schedule]] = {
    "polynomial_decay": PolynomialDecay,
    "constant": ConstantSparsity,
    "linear": LinearDecay,
    "cosine": CosineDecay,
    "exponential": ExponentialDecay,
    "one_shot": OneShot,
    "multi_step": MultiStep,
}


def as_schedule(schedule: Any) -> Schedule:
    """Returns a `Schedule`; converts a schedule of a package in `SCHEDULE_SOURCES`, and a final sparsity.

    Raises:
        TypeError: `schedule` is none of these.
        ValueError: The schedule of the other package has no equivalent.
    """
    if isinstance(schedule, float | int) and not isinstance(schedule, bool):
        return PolynomialDecay(final_sparsity=schedule)
    packages = [base.__module__.partition(".")[0] for base in type(schedule).__mro__]
    source = next((SCHEDULE_SOURCES[package] for package in packages if package in SCHEDULE_SOURCES), None)
    found = schedule if source is None else source.load()(schedule)
    if not isinstance(found, Schedule):
        raise TypeError(
            "`schedule` must be a schedule, for example "
            f"pk.schedules.PolynomialDecay(final_sparsity=0.8), or a sparsity. Received: {schedule!r}."
        )
    return found


def _set(schedule: Schedule, name: str, value: Any) -> None:
    """Sets a field of a frozen schedule to a checked plain Python number; NumPy scalars would not serialise."""
    object.__setattr__(schedule, name, value)


def _check_order(begin_step: int, end_step: int, remedy: str = "") -> None:
    if end_step < begin_step:
        raise ValueError(
            f"A schedule needs begin_step <= end_step. Received: begin_step={begin_step}, end_step={end_step}.{remedy}"
        )


def _sequence(pairs: Any) -> Iterable[Any]:
    if not isinstance(pairs, tuple | list):
        shown = "a large number" if isinstance(pairs, int) and abs(pairs) > LARGEST else repr(pairs)
        raise TypeError(f"sparsities must be (step, sparsity) pairs. Received: {shown} of type {type(pairs).__name__}.")
    return pairs


def _pair(index: int, pair: Any) -> tuple[int, float]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"sparsities[{index}] must be a (step, sparsity) pair. Received: {pair!r}.")
    step, sparsity = pair
    return whole(f"sparsities[{index}] step", step, minimum=0), fraction(f"sparsities[{index}] sparsity", sparsity)
