"""The leak matrix: every Keras optimizer x what it can be asked for x every kind of loop, and how one cell is checked.

A cell trains a tiny model (a convolution, an embedding with sparse gradients, two dense layers) while its masks change
four times. After every execution of the compiled step, before and after prunekit had its turn, the raw variables are
read with NumPy: what was zero stays zero, the optimizer's slots there are zero, nothing is NaN. prunekit's own audit
and its way of finding slots are not used. `leak_table` runs the whole product and writes docs/leak-matrix.md.
"""

import contextlib
import inspect
import itertools
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from prunekit.sparsity.schedules import PolynomialDecay
from prunekit.training.callbacks import PruningCallback
from prunekit.training.masking import LeakError
from prunekit.training.pruner import Pruner

# ---------------------------------------------------------------- the axes


def find_optimizers() -> dict[str, type]:
    """Every optimizer class in `keras.optimizers`, by its public name."""
    public = {name: getattr(keras.optimizers, name) for name in dir(keras.optimizers) if not name.startswith("_")}
    return {
        name: value
        for name, value in sorted(public.items())
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
    }


OPTIMIZERS = find_optimizers()

# Variant -> the optimizer's arguments; the last four are about how the step is run.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "weight decay": {"weight_decay": 0.1},
    "EMA": {"use_ema": True, "ema_momentum": 0.9},
    "EMA overwrite": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "mixed_float16": {},
    "jit_compile": {},
    "3 steps per execution": {},
    "run_eagerly": {},
}
LOOPS = ("fit", "fit after fit", "train_on_batch", "custom train_step", "tape")

FTRL_START = np.float32(0.1)
ZERO_MAKERS = (keras.optimizers.Ftrl, keras.optimizers.ScheduleFreeAdamW)
# Wrappers take the arguments of an optimizer inside them; these are the ones they hold here.
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer")

# The update at 8 is the last: 3 does not divide 8. Training goes on for 4 updates; a loss scale may skip some.
SCHEDULE = PolynomialDecay(initial_sparsity=0.3, final_sparsity=0.85, begin_step=0, end_step=8, frequency=3)
UPDATES, BATCH = 12, 4


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the product."""

    optimizer: str
    variant: str
    loop: str

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.variant}, {self.loop}"


@dataclass(frozen=True)
class Outcome:
    """What a cell came to.

    Attributes:
        cell: Which one.
        status: "ok", "keras" (plain Keras refuses it in the same way), "refused" (prunekit refuses it, with a remedy),
            or "failed".
        reason: Why, where it is not "ok".
        batches: Executions of the compiled step that were checked.
        positions: Values checked at pruned positions, in weights and slots, over all checks.
        seconds: Time it took.
    """

    cell: Cell
    status: str
    reason: str = ""
    batches: int = 0
    positions: int = 0
    seconds: float = 0.0


def exists(optimizer: str, variant: str) -> bool:
    """Whether the optimizer takes what the variant asks for; only `momentum` is not everyone's."""
    if variant != "momentum" or optimizer in WRAPPERS:
        return True
    return "momentum" in inspect.signature(OPTIMIZERS[optimizer]).parameters


def product() -> list[Cell]:
    """All cells."""
    cells = itertools.product(OPTIMIZERS, VARIANTS, LOOPS)
    return [Cell(*values) for values in cells if exists(*values[:2])]


def pairs(cell: Cell) -> set[tuple[str, str]]:
    """The three pairs of values that a cell tries."""
    return {(cell.optimizer, cell.variant), (cell.optimizer, cell.loop), (cell.variant, cell.loop)}


def cover() -> list[Cell]:
    """A subset of the product in which every pair of values occurs; greedy, always the same."""
    missing = set().union(*(pairs(cell) for cell in product()))
    chosen = []
    for optimizer, variant in itertools.product(OPTIMIZERS, VARIANTS):
        if not exists(optimizer, variant):
            continue
        # Starting elsewhere in each row and column, so that equals do not all fall on the first loop.
        shift = list(OPTIMIZERS).index(optimizer) + list(VARIANTS).index(variant)
        loops = [LOOPS[(shift + i) % len(LOOPS)] for i in range(len(LOOPS))]
        cell = max((Cell(optimizer, variant, loop) for loop in loops), key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(cell)
        chosen.append(cell)
    while missing:
        cell = max(product(), key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(cell)
        chosen.append(cell)
    return chosen


# ---------------------------------------------------------------- the model, its optimizer and its data


@keras.saving.register_keras_serializable(package="leak_matrix")
class CustomStep(keras.Model):
    """A functional model with a train_step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def build_model(cell: Cell) -> keras.Model:
    """A convolution beside an embedding, then two dense layers; compiled as the cell asks."""
    image, words = keras.Input((5, 5, 2), name="image"), keras.Input((3,), dtype="int32", name="words")
    x = keras.layers.Conv2D(4, 3, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(3.0), name="conv")(
        image
    )
    x = keras.layers.Flatten(name="flat_image")(x)
    e = keras.layers.Flatten(name="flat_words")(keras.layers.Embedding(11, 5, name="embedding")(words))
    x = keras.layers.Dense(7, activation="tanh", name="hidden")(keras.layers.Concatenate(name="both")([x, e]))
    x = keras.layers.Dense(3, name="logits", dtype="float32")(x)
    model = (CustomStep if cell.loop == "custom train_step" else keras.Model)([image, words], x)
    model.compile(
        build_optimizer(cell),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=cell.variant == "jit_compile",
        run_eagerly=cell.variant == "run_eagerly",
        steps_per_execution=3 if cell.variant == "3 steps per execution" else 1,
    )
    return model


def build_optimizer(cell: Cell) -> keras.optimizers.Optimizer:
    """The cell's optimizer; the wrappers hold SGD and Adam, given what the variant asks for."""
    arguments = {"learning_rate": 0.01, **VARIANTS[cell.variant]}
    if cell.optimizer == "LossScaleOptimizer":
        inner = keras.optimizers.SGD if cell.variant == "momentum" else keras.optimizers.Adam
        return keras.optimizers.LossScaleOptimizer(inner(**arguments), initial_scale=1024.0)
    if cell.optimizer == "MultiOptimizer":
        without = {name: value for name, value in arguments.items() if name != "momentum"}
        choice = keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(**without), {"conv/.*": keras.optimizers.SGD(**arguments)}
        )
        return keras.optimizers.MultiOptimizer(choice)
    return OPTIMIZERS[cell.optimizer](**arguments)


def make_data(cell: Cell) -> tuple[list[np.ndarray], np.ndarray]:
    """As many batches as it takes for `UPDATES` updates; with accumulation an update takes two."""
    batches = UPDATES * VARIANTS[cell.variant].get("gradient_accumulation_steps", 1)
    generator = np.random.default_rng(5)
    n = batches * BATCH
    image = generator.normal(size=(n, 5, 5, 2)).astype("float32")
    # Some words never come, a pixel is always dark: rows without any gradient.
    image[:, 0, 0] = 0
    return [image, generator.integers(0, 8, (n, 3)).astype("int32")], generator.integers(0, 3, n)


def parts_of(optimizer) -> list[Any]:
    """The optimizer and those inside it."""
    inside = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(part for one in inside if one is not None for part in parts_of(one))]


# ---------------------------------------------------------------- checking


class Leak(AssertionError):
    """A check of the matrix found something."""


def prefix(variable: keras.Variable) -> str:
    """How Keras begins the names of the slots that it makes for this weight."""
    return variable.path.replace("/", "_") + "_"


@dataclass
class Checker:
    """Reads raw variables and remembers which positions were zero."""

    model: keras.Model
    zeros: dict[str, np.ndarray] = field(default_factory=dict)
    batches: int = 0
    positions: int = 0

    @property
    def makes_zeros(self) -> bool:
        """Ftrl and ScheduleFreeAdamW themselves set weights that never had a gradient to zero; these are not pruned."""
        return any(isinstance(part, ZERO_MAKERS) for part in parts_of(self.model.optimizer))

    @property
    def is_ftrl(self) -> bool:
        """Whether the optimizer is Ftrl, or holds it."""
        return any(isinstance(part, keras.optimizers.Ftrl) for part in parts_of(self.model.optimizer))

    @property
    def weights(self) -> dict[str, keras.Variable]:
        """The weights that the schedule prunes, by path."""
        layers = [self.model.get_layer(name) for name in ("conv", "embedding", "hidden", "logits")]
        return {layer.name: layer.embeddings if layer.name == "embedding" else layer.kernel for layer in layers}

    def slots(self, variable: keras.Variable) -> list[keras.Variable]:
        """The optimizer's variables that were made from this weight, told by name and shape."""
        return [
            slot
            for slot in self.model.optimizer.variables
            if slot.name.startswith(prefix(variable)) and tuple(slot.shape) == tuple(variable.shape)
        ]

    def check(self, where: str) -> None:
        """What was zero at the last `learn` is zero now, in weights and slots; nothing is NaN.

        Raises:
            Leak: It is not so.
        """
        for name, variable in self.weights.items():
            zero = self.zeros.get(name)
            if zero is None:
                continue
            for held in [variable, *self.slots(variable)]:
                # Ftrl divides by this slot, so that zero would become NaN: it holds what Keras starts it with.
                rest = FTRL_START if self.is_ftrl and held.name.removeprefix(prefix(variable)) == "accumulator" else 0
                leaked = np.count_nonzero(np.asarray(held)[zero] != rest)
                if leaked:
                    raise Leak(f"{leaked} of {zero.sum()} pruned positions of {held.path} are not {rest} {where}")
                self.positions += int(zero.sum())
        for variable in [*self.model.variables, *self.model.optimizer.variables]:
            if not np.isfinite(np.asarray(variable, dtype="float64")).all():
                raise Leak(f"{variable.path} holds NaN or infinity {where}")

    def learn(self, masks: dict[str, np.ndarray], asked: float, where: str) -> None:
        """Takes the pruned positions from the masks, and compares them with the zeros there are and were.

        Raises:
            Leak: The count is not exactly what was asked for, or a position came back, or zeros and masks differ.
        """
        for name, variable in self.weights.items():
            (mask,) = (mask for target, mask in masks.items() if target.startswith(name + "/"))
            pruned, zero = ~mask, np.asarray(variable) == 0
            if pruned.sum() != round(asked * pruned.size):
                raise Leak(f"{pruned.sum()} of {pruned.size} in {name} are pruned; {asked:.4f} was asked for {where}")
            if np.any(self.zeros.get(name, False) & ~pruned):
                raise Leak(f"pruned positions of {name} came back {where}")
            if np.any(pruned & ~zero):
                raise Leak(f"{np.sum(pruned & ~zero)} pruned positions of {name} are not zero {where}")
            if np.any(zero & ~pruned) and not self.makes_zeros:
                raise Leak(f"{np.sum(zero & ~pruned)} zeros of {name} are not in its mask {where}")
            self.zeros[name] = pruned

    def both(self, pruner: Pruner, where: str) -> None:
        """`check` before and after the zeros of now are learned."""
        self.check(where)
        if pruner.events:
            self.learn(pruner.masks, pruner.events[-1].asked, where)
            self.check(where)


class Spy(keras.callbacks.Callback):
    """Checks after each execution; one is listed before the PruningCallback and one after it."""

    def __init__(self, checker: Checker, pruning: PruningCallback, *, last: bool):
        super().__init__()
        self.checker, self.pruning, self.last = checker, pruning, last

    def on_train_begin(self, logs=None):
        self.own = self.model.train_function

    def on_train_batch_end(self, batch, logs=None):
        where = f"after batch {batch}, seen {'after' if self.last else 'before'} the PruningCallback"
        if self.last:
            self.checker.both(self.pruning.pruner, where)
            self.checker.batches += 1
        else:
            self.checker.check(where)
        if self.model.train_function is not self.own:
            raise Leak(f"the model's train function is not its own {where}")
        expect_no_trace(self.model, where)


def expect_no_trace(model: keras.Model, where: str) -> None:
    """Nothing of prunekit's hangs on the model, its optimizer or its weights."""
    for owner in [model, *model.layers, *model.variables, *parts_of(model.optimizer)]:
        for name, value in vars(owner).items():
            if _is_ours(value):
                raise Leak(f"{type(owner).__name__}.{name} is prunekit's {value!r} {where}")


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or type(value).__module__).startswith("prunekit")


@dataclass(frozen=True)
class Snapshot:
    """What must be as it was when training is over."""

    kind: type
    config: dict[str, Any]
    constraints: list[Any]
    test_function: Any
    attributes: set[str]
    variables: int

    @classmethod
    def of(cls, model: keras.Model) -> "Snapshot":
        """Of the optimizer as it will be once it is built: a copy of it is built here."""
        optimizer = model.optimizer
        copy = type(optimizer).from_config(optimizer.get_config())
        copy.build(model.trainable_variables)
        return cls(
            kind=type(optimizer),
            config=optimizer.get_config(),
            constraints=[variable.constraint for variable in model.variables],
            test_function=model.test_function,
            attributes=set(vars(copy)),
            variables=len(copy.variables),
        )

    def compare(self, model: keras.Model) -> None:
        """Raises Leak where the model is not as it was."""
        now = Snapshot.of(model)
        optimizer = model.optimizer
        # Keras fills this cache when it decays weights.
        extra = set(vars(optimizer)) - self.attributes - {"_exclude_from_weight_decay_cache"}
        if extra or len(optimizer.variables) != self.variables:
            raise Leak(f"the optimizer has {extra or len(optimizer.variables)} that it had not")
        for name in ("kind", "config", "test_function"):
            if getattr(now, name) != getattr(self, name):
                raise Leak(f"{name} was {getattr(self, name)!r} and is {getattr(now, name)!r}")
        if any(a is not b for a, b in zip(now.constraints, self.constraints, strict=True)):
            raise Leak("the constraints are not the ones that were there")
        expect_no_trace(model, "at the end")


# ---------------------------------------------------------------- the loops: each with and without prunekit


def _batches(data, cell: Cell) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    (image, words), labels = data
    for i in range(0, len(labels), BATCH):
        yield [image[i : i + BATCH], words[i : i + BATCH]], labels[i : i + BATCH]


def _fit(model, data, cell: Cell, checker: Checker | None) -> None:
    callbacks: list[Any] = []
    if checker:
        pruning = PruningCallback(SCHEDULE)
        callbacks = [Spy(checker, pruning, last=False), pruning, Spy(checker, pruning, last=True)]
    # Two epochs, so that something happens between them.
    half = [array[: len(array) // 2] for array in (*data[0], data[1])]
    former = model.train_function
    model.fit(half[:2], half[2], batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    if checker:
        checker.both(pruning.pruner, "after fit")
    if former is not None and model.train_function is not former:
        raise Leak("the model's train function is not the one it had")


def _fit_after_fit(model, data, cell: Cell, checker: Checker | None) -> None:
    first = [array[: 3 * BATCH] for array in (*data[0], data[1])]
    model.fit(first[:2], first[2], batch_size=BATCH, shuffle=False, verbose=0)
    _fit(model, data, cell, checker)
    if checker:
        model.fit(first[:2], first[2], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        if not np.count_nonzero(np.asarray(checker.weights["hidden"])[checker.zeros["hidden"]]):
            raise Leak("a plain fit after the pruning still holds the zeros")
        checker.zeros.clear()
        checker.check("in a plain fit afterwards")


def _in_a_loop(model, data, cell: Cell, checker: Checker | None, update: Callable[..., None], size: int = 1) -> None:
    batches = list(_batches(data, cell))
    former = model.train_function
    with Pruner(model, SCHEDULE) if checker else contextlib.nullcontext() as pruner:
        if checker:
            checker.both(pruner, "before training")
        for i in range(0, len(batches), size):
            update(batches[i : i + size])
            if checker:
                checker.check(f"after batch {i}, before step()")
                pruner.step()
                checker.both(pruner, f"after batch {i}")
                checker.batches += 1
    model.optimizer.finalize_variable_values(model.trainable_variables)
    if checker:
        checker.both(pruner, "after finish()")
        if model.train_function is not former:
            raise Leak("the model's train function is not the one it had")


def _train_on_batch(model, data, cell: Cell, checker: Checker | None) -> None:
    _in_a_loop(model, data, cell, checker, lambda batches: model.train_on_batch(*batches[0]))


def _tape(model, data, cell: Cell, checker: Checker | None) -> None:
    size = 3 if cell.variant == "3 steps per execution" else 1

    def step(batches):
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = model.optimizer.scale_loss(model.loss(y, model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if cell.variant != "run_eagerly":
        step = tf.function(step, jit_compile=cell.variant == "jit_compile")

    def update(batches):
        step([([tf.constant(part) for part in x], tf.constant(y)) for x, y in batches])

    _in_a_loop(model, data, cell, checker, update, size)


RUN: dict[str, Callable[..., None]] = {
    "fit": _fit,
    "fit after fit": _fit_after_fit,
    "train_on_batch": _train_on_batch,
    "custom train_step": _fit,
    "tape": _tape,
}

# ---------------------------------------------------------------- one cell


def run_cell(cell: Cell) -> Outcome:
    """Trains the cell's model while pruning it, checking all along; where that raises, finds out whether Keras does."""
    start = time.perf_counter()
    checker = Checker.__new__(Checker)
    status, reason = "ok", ""
    try:
        with _prepared(cell):
            model = build_model(cell)
            checker.__init__(model)  # type: ignore[misc]
            before = Snapshot.of(model)
            RUN[cell.loop](model, make_data(cell), cell, checker)
            before.compare(model)
            if cell.loop != "fit after fit":
                _expect_the_zeros_in_a_file(model, checker)
    except Exception as error:  # noqa: BLE001 - whatever a cell raises is its outcome
        status, reason = _judge(cell, error)
    seconds = time.perf_counter() - start
    return Outcome(
        cell, status, reason, getattr(checker, "batches", 0), getattr(checker, "positions", 0), round(seconds, 2)
    )


@contextlib.contextmanager
def _prepared(cell: Cell) -> Iterator[None]:
    # The garbage goes with the process, which is renewed: collecting it takes longer than the training.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_float16" if cell.variant == "mixed_float16" else "float32")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # NumPy 2 about Keras saving its variables.
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
            yield
    finally:
        keras.config.set_dtype_policy("float32")


def _expect_the_zeros_in_a_file(model: keras.Model, checker: Checker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    for name, zero in checker.zeros.items():
        layer = loaded.get_layer(name)
        weight = np.asarray(layer.embeddings if name == "embedding" else layer.kernel)
        if np.any((weight == 0) != zero) and not (checker.makes_zeros and np.all(weight[zero] == 0)):
            raise Leak(f"{name} has other zeros in the saved file")
        if zero.sum() != round(SCHEDULE.final_sparsity * zero.size):
            raise Leak(f"{name} ends with {zero.sum()} zeros of {zero.size}")
    if len(loaded.optimizer.variables) != len(model.optimizer.variables):
        raise Leak("the saved optimizer has other variables")


def _judge(cell: Cell, error: Exception) -> tuple[str, str]:
    """(status, reason) of an exception: the same cell without prunekit tells whose it is."""
    if isinstance(error, LeakError):
        return "refused", str(error)
    plain = run_plain(cell)
    if plain is not None:
        return "keras", plain
    where = "" if isinstance(error, Leak) else " | " + traceback.format_exc(limit=-3)
    return "failed", f"{_line(error)}{where}"


def run_plain(cell: Cell) -> str | None:
    """What goes wrong in the cell without prunekit; None where all is well."""
    try:
        with _prepared(cell):
            model = build_model(cell)
            Snapshot.of(model)
            RUN[cell.loop](model, make_data(cell), cell, None)
            Checker(model).check("without prunekit")
            with tempfile.TemporaryDirectory() as folder:
                model.save(Path(folder) / "model.keras")
                keras.models.load_model(Path(folder) / "model.keras")
    except Exception as error:  # noqa: BLE001 - the question is whether there is one
        return _line(error)
    return None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# ---------------------------------------------------------------- many cells


def _quiet() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def run_cells(cells: Sequence[Cell], jobs: int = 1) -> Iterator[Outcome]:
    """Outcomes as they come, in the order of the cells; `jobs` processes, each renewed every 60 cells."""
    import multiprocessing

    # Not concurrent.futures: its max_tasks_per_child never starts the second generation in Python 3.11.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_quiet, maxtasksperchild=60) as pool:
        yield from pool.imap(run_cell, cells)
