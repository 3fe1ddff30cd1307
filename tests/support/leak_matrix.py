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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from backends import BACKEND
from leak_checks import Checker, Leak, Snapshot, read
from leak_loops import BATCH, PHASES, RUN, SCHEDULE, UPDATES, CustomStep

from prunekit.techniques.pruning.masks.mask_store import _KEEP_ZERO_SLOTS, LeakError

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
LOOPS = tuple(RUN)
# The product has the policy "gradual"; each policy whose masks move has the cells of the short suite.
MOVING = ("rigl", "set", "ac_dc", "straight_through")

# Wrappers take the arguments of an optimizer inside them; these are the ones they hold here.
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer")


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the product."""

    optimizer: str
    variant: str
    loop: str
    policy: str = "gradual"

    def __str__(self) -> str:
        policy = () if self.policy == "gradual" else (self.policy,)
        return ", ".join((self.optimizer, self.variant, self.loop, *policy))

    def options(self, data: Any) -> dict[str, Any]:
        """The options of the pruning."""
        return {"policy": self.policy, "allocation": "uniform"} | ({"data": data} if self.policy == "rigl" else {})

    @property
    def schedule(self) -> Any:
        """The schedule of the pruning."""
        return PHASES if self.policy == "ac_dc" else SCHEDULE


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


# What a backend has no second way of doing: JAX compiles every step, and Keras runs each step on PyTorch by itself.
ABSENT = {"jax": {"jit_compile"}, "torch": {"jit_compile", "3 steps per execution", "run_eagerly"}}.get(BACKEND, set())


def exists(optimizer: str, variant: str) -> bool:
    """Whether the backend has the variant, and the optimizer takes what it asks for: `momentum` is not everyone's."""
    if variant in ABSENT:
        return False
    if variant != "momentum" or optimizer in WRAPPERS:
        return True
    return "momentum" in inspect.signature(OPTIMIZERS[optimizer]).parameters


def product() -> list[Cell]:
    """All cells."""
    cells = itertools.product(OPTIMIZERS, VARIANTS, LOOPS)
    return [Cell(*values) for values in cells if exists(*values[:2])]


# A cell on JAX takes three seconds, nearly all of it to compile: there every optimizer and every variant meets every
# loop, which is what differs between backends, but not every optimizer meets every variant.
THIN = BACKEND == "jax"


def pairs(cell: Cell) -> set[tuple[str, str]]:
    """The pairs of values that a cell tries: all three, or two where the subset is thin."""
    with_loop = {(cell.optimizer, cell.loop), (cell.variant, cell.loop)}
    return with_loop if THIN else {(cell.optimizer, cell.variant), *with_loop}


def cover() -> list[Cell]:
    """A subset of the product in which every pair of `pairs` occurs; greedy, always the same."""
    missing = set().union(*(pairs(cell) for cell in product()))
    chosen = []
    for row in _rows():
        cell = max(row, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(cell)
        chosen.append(cell)
    while missing:
        cell = max(product(), key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(cell)
        chosen.append(cell)
    return chosen


# Optimizers that the enforcement of masks treats in a way of their own: wrappers, an update that mixes positions, slots
# that rest at another value than zero, factored slots. Of the others, some keep slots at zero by themselves.
SPECIAL = (*WRAPPERS, "Muon", "Ftrl", "Adafactor")


def kind_of(optimizer: str) -> str:
    """Which optimizers the enforcement treats alike."""
    return optimizer if optimizer in SPECIAL else f"keeps zero slots: {OPTIMIZERS[optimizer] in _KEEP_ZERO_SLOTS}"


_HOW_STEPS_RUN = ("accumulation", "jit_compile", "3 steps per execution", "run_eagerly")


def _short_pairs(cell: Cell) -> set[tuple[str, str]]:
    """What the short suite tries: each value of each axis, and on TensorFlow pairs that the enforcement tells apart."""
    found = {("optimizer", cell.optimizer), ("variant", cell.variant), ("loop", cell.loop)}
    if BACKEND == "tensorflow":
        kind, way = kind_of(cell.optimizer), way_of(cell.loop)
        found.add((kind, way))
        # Averages and the scale of the loss are the optimizer's; the others say how a step is run.
        found |= {(kind, cell.variant)} if cell.variant in ("EMA overwrite", "mixed_float16") else set()
        found |= {(cell.variant, way)} if cell.variant in _HOW_STEPS_RUN else set()
    return found


def way_of(loop: str) -> str:
    """What prunes in the loop: the callback of `fit`, or a `Pruner`."""
    in_fit = ("fit", "fit after fit", "custom train_step", "quantized fit", "clustered fit")
    return "callback" if loop in in_fit else "pruner"


def short_cover() -> list[Cell]:
    """A subset of `cover` for the short suite; greedy, always the same."""
    cells = cover()
    missing = set().union(*map(_short_pairs, cells))
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(_short_pairs(cell) & missing)))
        missing -= _short_pairs(chosen[-1])
    return chosen


def moving_cover() -> list[Cell]:
    """Each optimizer, variant and loop with each policy whose masks move, where the policy takes them."""
    cells = [replace(cell, policy=policy) for policy in MOVING for cell in short_cover()]
    return [cell for cell in cells if (cell.policy, cell.variant) != ("straight_through", "EMA overwrite")]


def _rows() -> Iterator[list[Cell]]:
    """Cells to choose one of: of an optimizer and a variant, or of an optimizer and a loop where the subset is thin.

    Each row starts elsewhere, so that equals do not all fall on the first loop or variant.
    """
    columns = list(LOOPS if THIN else VARIANTS)
    for (i, optimizer), (j, column) in itertools.product(enumerate(OPTIMIZERS), enumerate(columns)):
        others = _from(5 * i + j, list(VARIANTS)) if THIN else _from(i + j, list(LOOPS))
        both = [(other, column) if THIN else (column, other) for other in others]
        row = [Cell(optimizer, *values) for values in both if exists(optimizer, values[0])]
        if row:
            yield row


def _from(place: int, values: list[str]) -> list[str]:
    return [values[(place + i) % len(values)] for i in range(len(values))]


# ---------------------------------------------------------------- the model, its optimizer and its data


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
        jit_compile="auto" if BACKEND == "jax" else cell.variant == "jit_compile",
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


# ---------------------------------------------------------------- one cell


def run_cell(cell: Cell) -> Outcome:
    """Trains the cell's model while pruning it, checking all along; where that raises, finds out whether Keras does."""
    start = time.perf_counter()
    checker = Checker.__new__(Checker)
    status, reason = "ok", ""
    try:
        with _prepared(cell):
            model = build_model(cell)
            checker.__init__(model, cell.policy in MOVING, cell.policy != "straight_through")  # type: ignore[misc]
            before = Snapshot.of(model)
            RUN[cell.loop](model, make_data(cell), cell, checker)
            before.compare(model)
            # A look at every third update may miss what came back, or find that it is what the same update pruned.
            each = cell.variant != "3 steps per execution" and (BACKEND != "jax" or cell.loop != "fit after fit")
            if checker.moves and checker.starts_at_zero and each and not checker.returned:
                raise Leak("no pruned position came back")
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
        weight = read(layer.embeddings if name == "embedding" else layer.kernel)
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
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def run_cells(cells: Sequence[Cell], jobs: int = 1) -> Iterator[Outcome]:
    """Outcomes as they come, in the order of the cells; `jobs` processes, each renewed every 60 cells."""
    import multiprocessing

    # Not concurrent.futures: its max_tasks_per_child never starts the second generation in Python 3.11.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_quiet, maxtasksperchild=60) as pool:
        yield from pool.imap(run_cell, cells)
