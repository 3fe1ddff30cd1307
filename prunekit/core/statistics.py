"""Statistics: what criteria and policies are told about targets, collected from training or from data."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras

from prunekit.anatomy.targets import Target
from prunekit.core.calibration import batches_of
from prunekit.core.snapshot import Snapshot, arrays_under
from prunekit.sparsity.shorthands import STATISTICS


class Collector(ABC):
    """Collects one statistic of the targets of a model.

    Subclass `DataCollector` or `TrainingCollector`, or this class for a statistic of the model alone, whose `values`
    are read at each mask update.

    Args:
        model: The model.
        targets: The weights that the statistic describes.
    """

    def __init__(self, model: Any, targets: Sequence[Target]):
        self.model = model
        self.targets = tuple(targets)

    def check(self) -> None:  # noqa: B027
        """Raises if the statistic does not exist for a target; reads no data, and the default checks nothing.

        Raises:
            ValueError: The statistic does not exist for the model or for one of the targets.
        """

    @abstractmethod
    def values(self) -> list[Any]:
        """Returns the statistic of each target: a tensor, or a structure of tensors."""


class DataCollector(Collector):
    """Collects a statistic from calibration data at each mask update.

    Attributes:
        passes: Number of passes over the data; each shows all batches.
    """

    passes: int = 1

    @abstractmethod
    def reset(self) -> None:
        """Forgets all batches."""

    def begin_pass(self, number: int) -> None:  # noqa: B027
        """Begins a pass over the data; `number` counts from 0, and the default does nothing."""

    @abstractmethod
    def observe(self, inputs: Any, labels: Any) -> None:
        """Observes one batch.

        Args:
            inputs: Inputs of the model, as its call takes them.
            labels: Labels, or None if the data have none.
        """


class TrainingCollector(Collector):
    """Collects a statistic from optimizer updates, and saves and restores it for interrupted trainings."""

    @property
    @abstractmethod
    def observations(self) -> int:
        """Number of updates observed so far."""

    @abstractmethod
    def observing(self, optimizers: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Returns a context manager in which every update of the optimizers is observed, also when traced."""

    @abstractmethod
    def state(self) -> Snapshot:
        """Returns the values and arrays that `restore` continues from."""

    @abstractmethod
    def restore(self, state: Snapshot) -> None:
        """Continues from the result of `state` of an earlier training."""


def check_statistics(needs: Collection[str], model: Any, targets: Sequence[Target]) -> None:
    """Raises if a statistic that is not from training does not exist for a target, before there are data.

    Raises:
        ValueError: A statistic is not registered, or does not exist for the model or for one of the targets.
    """
    for row in [STATISTICS.named(name) for name in sorted(needs)]:
        if row.source != "training":
            row.load()(model, targets).check()


class Collectors:
    """The collectors of all statistics that a pruning run needs.

    Args:
        needs: Names of the statistics.
        model: The model.
        targets: The weights that the statistics describe.
        data: Calibration data for statistics from data, as `batches_of` takes them, or None.

    Raises:
        ValueError: A statistic is not registered, needs data and there are none, or does not exist for a target.
        RuntimeError: A statistic does not exist on this backend.
    """

    def __init__(self, needs: Collection[str], model: Any, targets: Sequence[Target], data: Any = None):
        self._data = data
        rows = [STATISTICS.named(name) for name in sorted(needs)]
        lacking = [row.name for row in rows if row.source == "data"] if data is None else []
        if lacking:
            raise ValueError(
                f"The statistic {lacking[0]!r} is collected from data. Received: no data. Pass `data`: inputs, a pair "
                "(inputs, labels), or batches of them."
            )
        for row in rows:
            if row.backends and keras.backend.backend() not in row.backends:
                raise RuntimeError(
                    f"The statistic {row.name!r} is collected on the backends {', '.join(row.backends)}. Received: the "
                    f"{keras.backend.backend()} backend. Choose another criterion, or run with "
                    f"KERAS_BACKEND={row.backends[0]}."
                )
        self._collectors: dict[str, Collector] = {row.name: row.load()(model, targets) for row in rows}
        for collector in self._collectors.values():
            collector.check()

    @property
    def from_training(self) -> dict[str, TrainingCollector]:
        """The collectors that observe optimizer updates, by name."""
        return {name: one for name, one in self._collectors.items() if isinstance(one, TrainingCollector)}

    @property
    def unobserved(self) -> list[str]:
        """Names of the statistics from training that have observed no update yet."""
        return [name for name, one in self.from_training.items() if not one.observations]

    @contextlib.contextmanager
    def observing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Context manager in which the statistics from training observe every update of the optimizers."""
        with contextlib.ExitStack() as stack:
            for collector in self.from_training.values():
                stack.enter_context(collector.observing(optimizers))
            yield

    def values(self) -> list[dict[str, Any]] | None:
        """Returns {name: value} for each target, after a pass over the data if a statistic needs one; None if empty."""
        if not self._collectors:
            return None
        from_data = [one for one in self._collectors.values() if isinstance(one, DataCollector)]
        for collector in from_data:
            collector.reset()
        for number in range(max((one.passes for one in from_data), default=0)):
            self._pass_over_data(number, [one for one in from_data if one.passes > number])
        columns = {name: one.values() for name, one in self._collectors.items()}
        count = len(next(iter(columns.values())))
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]

    def _pass_over_data(self, number: int, collectors: Sequence[DataCollector]) -> None:
        for collector in collectors:
            collector.begin_pass(number)
        for inputs, labels in batches_of(self._data):
            for collector in collectors:
                collector.observe(inputs, labels)

    def state(self) -> Snapshot:
        """Returns the state of the statistics from training: {name: values}, and arrays named "name/array"."""
        states = {name: one.state() for name, one in self.from_training.items()}
        arrays = {f"{name}/{key}": array for name, state in states.items() for key, array in state.arrays.items()}
        return Snapshot({name: state.values for name, state in states.items()}, arrays)

    def restore(self, state: Snapshot) -> None:
        """Continues from the result of `state`.

        Raises:
            ValueError: The state lacks a statistic.
        """
        for name, collector in self.from_training.items():
            if name not in state.values:
                raise ValueError(
                    f"The statistic {name!r} needs the values collected before the interruption. Received: the "
                    "state of a training without it. Use the criterion of the first run."
                )
            collector.restore(Snapshot(state.values[name], arrays_under(state.arrays, f"{name}/")))
