"""Sets up the replicas of a run: one replica, several in one process, or replicas in several processes."""

import contextlib
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.core.training import distribution
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.settings.schema import Recipe
from prunekit.recipe.state import replica_state
from prunekit.recipe.state.interruption import ctrl_c_handled_by
from prunekit.recipe.state.progress import Listener, Progress
from prunekit.recipe.text.loader import RecipeError

_BACKENDS = {"mirrored": "tensorflow", "multi_worker": "tensorflow", "data_parallel": "jax"}
_TF_CONFIG = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": N}}'
_TRAINING = ("chief", "worker")
_PORT = re.compile(r".*:\d{1,5}", re.ASCII)
_LOST = (
    "distribute: multi_worker: another process of TF_CONFIG ended, or cannot be reached, so this process stops. Read "
    "the output of the other process, and start all processes again: with --resume (resume=True) they "
    "continue after the last checkpoint of the chief."
)
# Keras implements these options as a merge of replicas inside a condition, which tf.distribute does not support.
_CONDITIONAL = ("gradient_accumulation_steps", "ema_overwrite_frequency")


@dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a run.

    Attributes:
        kind: Value of the recipe's `distribute`.
        count: Number of replicas in all processes together.
        strategy: `tf.distribute` strategy; None on the JAX backend, and for a single replica without a strategy.
        chief: True if this process writes the run directory.
    """

    kind: str | None = None
    count: int = 1
    strategy: Any = None
    chief: bool = True

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context manager in which the model and the optimizer must be created."""
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    @property
    def several_processes(self) -> bool:
        """True if other processes train the same model."""
        return self.kind == "multi_worker"

    @property
    def means(self) -> int:
        """Number of per-replica means in the loss of a batch; 1 on JAX, which averages over the whole batch."""
        return 1 if self.strategy is None else self.count

    def means_lost_worker(self, error: Exception) -> bool:
        """Returns True if the error or its cause is a TensorFlow error that indicates a lost process."""
        if not self.several_processes:
            return False
        from tensorflow import errors

        gone = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
        return isinstance(error, gone) or isinstance(error.__cause__, gone)

    def notes(self) -> list[str]:
        """Returns the notes about the replicas for the report."""
        if self.kind is None:
            return []
        counted = f"{self.count} replica{'' if self.count == 1 else 's'}"
        return [f"distribute: {self.kind} trained on {counted}; another number of replicas rounds differently."]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Waits until every process of the run has called this method, and checks that all have the same facts.

        Args:
            facts: Name of a fact -> its value as text.

        Raises:
            RecipeError: The facts differ between processes; raised in every process.
        """
        if not self.several_processes:
            return
        digests = [hashlib.sha256(value.encode()).digest()[:8] for value in facts.values()]
        row = np.frombuffer(b"".join(digests), np.int64)
        rows = replica_state.gathered(self.strategy, [row for _ in replica_state.replicas_here(self.strategy)])
        differing = [name for name, same in zip(facts, (rows == rows[0]).all(axis=0), strict=True) if not same]
        if differing:
            raise RecipeError(
                f"the processes of distribute: multi_worker differ in: {', '.join(differing)}. Start all of them with "
                "the same recipe, data and options, and with an output folder that all of them see."
            )

    def check(self, settings: Compile | None, sizes: Mapping[str, int]) -> None:
        """Checks that the replicas can share every batch and support the optimizer's options.

        Args:
            settings: Compile settings; `batch_size` counts the examples of all replicas together.
            sizes: Number of examples of the data's "training", "validation" and "test" parts.

        Raises:
            RecipeError: A batch cannot be shared, or an optimizer option is not supported.
        """
        if settings is None or self.count == 1:
            return
        for name in _CONDITIONAL:
            if self.strategy is not None and settings.optimizer.arguments.get(name):
                raise RecipeError(
                    f"compile.optimizer: {name} does not work under tf.distribute in Keras: leave it out."
                )
        if settings.batch_size % self.count:
            raise RecipeError(
                "compile.batch_size: a batch is shared by all replicas, so its size must be a multiple of their "
                f"number, {self.count}. Received: {settings.batch_size}."
            )
        if self.strategy is not None:
            self._check_last_batch(settings.batch_size, sizes["training"])
            return
        for part, examples in sizes.items():
            if examples % self.count:
                raise RecipeError(
                    f"data: JAX divides every batch evenly between its {self.count} devices, the last one included. "
                    f"Received: {examples:,} {part} examples. Set data: {{limit: ...}} to a multiple of {self.count}."
                )

    def _check_last_batch(self, batch_size: int, examples: int) -> None:
        # TensorFlow gives each replica the same number of examples, rounded up, until none are left.
        last = examples % batch_size
        if last and (self.count - 1) * -(-last // self.count) >= last:
            raise RecipeError(
                f"compile.batch_size: with {batch_size}, the last batch of an epoch has {last} of {examples:,} "
                f"examples, which leaves one of {self.count} replicas without any: choose another size."
            )


ALONE = Replicas()


def check_distribution(recipe: Recipe, model: Any) -> None:
    """Checks that this process can run the recipe's `distribute`; does not use TensorFlow or change a weight.

    Raises:
        RecipeError: The backend or the environment does not fit `distribute`, or the given model is built already.
    """
    kind = recipe.distribute
    if kind is None:
        return
    backend = keras.backend.backend()
    if backend != _BACKENDS[kind]:
        raise RecipeError(
            f"distribute: {kind} needs Keras's {_BACKENDS[kind]} backend. Received: {backend}. "
            f"Run with KERAS_BACKEND={_BACKENDS[kind]}, or leave distribute out."
        )
    if isinstance(model, keras.Model):
        raise RecipeError(
            f"distribute: {kind} builds the model itself, on every replica. Received: a model that is built already. "
            "Save it, and give the path of the file."
        )
    if kind == "multi_worker":
        _check_task()


def _check_task() -> None:
    text = os.environ.get("TF_CONFIG")
    if not text:
        raise RecipeError(
            "distribute: multi_worker reads its workers from TF_CONFIG, which is not set: set it "
            f"in each process to {_TF_CONFIG}."
        )
    try:
        found = _names_a_worker(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        found = False
    if not found:
        raise RecipeError(
            f"distribute: TF_CONFIG must have the form {_TF_CONFIG}, name a worker, and give each worker a different "
            f"address. Received: {text}."
        )


def _names_a_worker(values: Any) -> bool:
    """Returns True if TF_CONFIG has a valid cluster with this task; on some invalid values TensorFlow waits forever."""
    kind, index = values["task"]["type"], str(values["task"]["index"])
    addresses = [address for group in values["cluster"].values() for address in group]
    ports = [_PORT.fullmatch(address) and int(address.rpartition(":")[2]) in range(1, 65_536) for address in addresses]
    return (
        kind in _TRAINING
        and all(isinstance(group, list) for group in values["cluster"].values())
        and all(ports)
        and len(set(addresses)) == len(addresses)
        and index.isdecimal()
        and int(index) < len(values["cluster"][kind])
    )


@contextlib.contextmanager
def distributed(recipe: Recipe, progress: Listener | None = None) -> Iterator[Replicas]:
    """Yields the replicas of a recipe for the duration of a run; waits for all workers, and reports the wait.

    Raises:
        RecipeError: TensorFlow was used earlier in this process, so workers cannot be connected; the address of this
            process is in use; or the processes have different clusters in `TF_CONFIG`.
        ConnectionError: Another process ended or cannot be reached.
    """
    if recipe.distribute is None:
        yield ALONE
    elif recipe.distribute == "data_parallel":
        parallel = keras.distribution.DataParallel()
        with parallel.scope():
            count = int(parallel.device_mesh.devices.size)
            yield Replicas(recipe.distribute, count, chief=distribution.is_chief())
    else:
        if recipe.distribute == "multi_worker" and progress is not None:
            progress(Progress(1, len(recipe.steps), recipe.steps[0].kind, 0.0, _waiting()))
        # While TensorFlow waits for other workers, Python does not handle signals.
        with ctrl_c_handled_by(signal.SIG_DFL):
            strategy = _strategy(recipe.distribute)
        chief = distribution.is_chief(strategy)
        replicas = Replicas(recipe.distribute, strategy.num_replicas_in_sync, strategy, chief)
        try:
            _meet(replicas)
            yield replicas
        except Exception as error:
            if not replicas.means_lost_worker(error):
                raise
            raise ConnectionError(_LOST) from error


def _meet(replicas: Replicas) -> None:
    if not replicas.several_processes:
        return
    from tensorflow import errors

    try:
        replicas.agree({"TF_CONFIG": json.dumps(_cluster(), sort_keys=True)})
    except (errors.InternalError, errors.InvalidArgumentError) as error:
        # Collectives fail with these errors if the processes have clusters of different sizes.
        raise RecipeError(
            "distribute: TF_CONFIG must have the same cluster in every process, and a different task in each. "
            f"Received: {os.environ['TF_CONFIG']}, and a different cluster in another process."
        ) from error


def _cluster() -> dict[str, list[str]]:
    """Returns the cluster in TF_CONFIG, which `_check_task` has validated."""
    return json.loads(os.environ["TF_CONFIG"])["cluster"]


def _own_address() -> str:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return _cluster()[task["type"]][int(task["index"])]


def _waiting() -> str:
    cluster = _cluster()
    others = sum(len(cluster.get(kind, ())) for kind in _TRAINING) - 1
    return f"waiting for {others} other worker{'' if others == 1 else 's'} of TF_CONFIG"


def _strategy(kind: str) -> Any:
    import tensorflow as tf

    if kind == "mirrored":
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise RecipeError(
            "distribute: multi_worker connects its workers before TensorFlow does anything else in a process. Run it "
            f"with prunekit compress, or as the first thing of a script. TensorFlow says: {error}"
        ) from error
    except tf.errors.UnknownError as error:
        # TensorFlow's message says only that its server could not be started.
        raise RecipeError(
            f"distribute: this process cannot listen at {_own_address()}, its address in TF_CONFIG: another process "
            "has that port, or another run that did not end. End it, or give another port in every process. "
            f"TensorFlow says: {error.message}"
        ) from error
