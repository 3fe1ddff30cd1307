"""Statistics: what criteria and policies are told about targets, collected from training or from data."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras

from prunekit.anatomy.layers.targets import Target
from prunekit.core.data.calibration import batches_of, example_count
from prunekit.core.runtime.snapshot import Snapshot, arrays_under
from prunekit.sparsity.shorthands import STATISTICS, readers_of

# What the progress of a pass over data is called.
READ = "examples read"


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
        told: Told of the examples of the present batch that were observed, by collectors that read it in parts.
    """

    passes: int = 1
    told: Callable[[int], None] = staticmethod(lambda examples: None)

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
        progress: Told of the examples that were read: (done, total, text).

    Raises:
        ValueError: A statistic is not registered, needs data and there are none, or does not exist for a target.
        RuntimeError: A statistic does not exist on this backend.
    """

    def __init__(
        self,
        needs: Collection[str],
        model: Any,
        targets: Sequence[Target],
        data: Any = None,
        progress: Callable[[int, int, str], None] | None = None,
    ):
        self._data, self._progress = data, progress
        rows = [STATISTICS.named(name) for name in sorted(needs)]
        lacking = [row.name for row in rows if row.source == "data"] if data is None else []
        if lacking:
            raise ValueError(
                f"{readers_of(lacking[0])} calibration data: the statistic {lacking[0]!r} is collected from data. "
                "Received: no data. Pass `data`: inputs, a pair (inputs, labels), or batches of them."
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
        read = _Read(self._progress, example_count(self._data), len(collectors[0].targets))
        for inputs, labels in batches_of(self._data):
            collectors[0].told = read.part
            for collector in collectors:
                collector.observe(inputs, labels)
            read.end_batch(len(keras.tree.flatten(inputs)[0]))

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


class _Read:
    """Tells how many examples of a pass over the data were read.

    Args:
        progress: As for `Collectors`.
        total: Number of examples; None = unknown.
        targets: Number of weights, of which none is done yet.
    """

    def __init__(self, progress: Callable[[int, int, str], None] | None, total: int | None, targets: int):
        self._progress, self._total, self._targets = progress, total, targets
        # Examples of the batches before the present one, and those that were told of.
        self._before = self._told = 0

    def part(self, examples: int) -> None:
        """Tells of so many examples of the present batch."""
        done = self._before + examples
        if self._progress is None or done <= self._told:
            return
        self._told = done
        if self._total is None:
            self._progress(0, self._targets, f"{done} {READ}")
        else:
            self._progress(done, self._total, READ)

    def end_batch(self, examples: int) -> None:
        """Tells of the end of a batch of so many examples."""
        self.part(examples)
        self._before += examples
