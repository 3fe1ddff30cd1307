"""What the tests share. TensorFlow's start-up chatter is silenced here and nowhere in the package."""

import atexit
import gc
import os
import shutil
import tempfile
import zipfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if os.environ.get("KERAS_BACKEND") == "torch":
    # Models are tiny, and two test processes share the cores: threads of PyTorch would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Most tests train the same small models: what one of them compiled, the others load, and so do processes on JAX
    # that tests on other backends start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="prunekit-jax-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import keras
import numpy as np
import pytest
from networks import dense_network
from short_suite import left_out

import prunekit as pk
from prunekit import cli
from prunekit.recipe.text.loader import load_recipe

if keras.backend.backend() == "torch":
    import torch

    # On a GPU, two runs of a convolution's gradient differ in the last digits otherwise.
    torch.backends.cudnn.deterministic = True

# Files that take a minute or more on some backend, the longest first: one that begins last keeps a single process busy.
# Those that start clusters are apart, since only one cluster runs at a time.
LONG = (
    "test_leak_matrix.py",
    "test_distribution.py",
    "test_bench.py",
    "test_killed_runs.py",
    "test_digits_recipe.py",
    "test_replicas.py",
    "test_backends.py",
    "test_killed_scripts.py",
    "test_resume_refused.py",
    "test_distribution_lost_workers.py",
    "test_distributed_data.py",
    "test_checkpoint.py",
    "test_runner.py",
    "test_model_building.py",
    "test_enforcement.py",
    "test_docs.py",
    "test_compress.py",
    "test_rematerialization.py",
    "test_sweep.py",
)


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="the short suite: no test marked `thorough`, fewer cases")


def pytest_collection_modifyitems(config, items):
    """Long files first. In the short suite, leaves out what is marked `thorough` and further cases of families."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if not config.getoption("--short"):
        return
    gone = left_out(items, keras.backend.backend())
    identities = set(map(id, gone))
    items[:] = [item for item in items if id(item) not in identities]
    config.hook.pytest_deselected(items=gone)


def pytest_collection_finish(session):
    """Excludes what the imports made from garbage collections.

    These millions of objects lie in memory that is rarely used. Where the system has taken such memory back, a full
    collection, which reads every object, takes up to a minute.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Excludes what is left after each file from later collections, for the same reason.

    TensorFlow keeps the graphs of `tf.cond` in cycles that no collection frees (measured on 2.21).
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers in every test, whichever ran before it."""
    keras.utils.set_random_seed(20)


@pytest.fixture(autouse=True)
def latencies_of_few_turns(monkeypatch):
    """Recipes time their files in the fewest turns: how long they are timed is nothing that most tests are about."""
    monkeypatch.setattr("prunekit.recipe.state.stages._SECONDS", 0.0)


@pytest.fixture(scope="module", autouse=True)
def empty_pages(request):
    """Runs write an empty page in the short suite: its figures take half a second, and most tests read the report."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--short"):
            patch.setattr("prunekit.recipe.run.runner.render_html", lambda report: "")
        yield


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """(QuantizationResult, IntegerExport, inputs) of a convolutional network with 8 bits."""
    from integer_networks import made

    model, inputs = made("fashion_cnn")
    done = pk.quantize(model, inputs)
    return done, done.export(tmp_path_factory.mktemp("eight") / "m.tflite"), inputs


@pytest.fixture
def perceptron():
    """A built two-layer perceptron, 8 -> 16 -> 4, not compiled."""
    return dense_network(8, hidden=16, logits=4)


def draw_samples():
    rng = np.random.default_rng(3)
    return rng.normal(size=(70, 8)).astype("float32"), rng.integers(0, 4, 70)


@pytest.fixture
def samples():
    """70 random inputs of 8 features and labels of 4 classes: the last batch of 16 is ragged."""
    return draw_samples()


@pytest.fixture(scope="module")
def pairs():
    """The same samples to train on and to test with, as recipes take them; no test changes them."""
    return (draw_samples(),) * 2


@pytest.fixture
def compiled(perceptron):
    """That perceptron, compiled with Adam."""
    perceptron.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return perceptron


@pytest.fixture
def batches(samples):
    """5 batches of 16 as `fit` arguments: x, y and batch size; the last one has 6."""
    return {"x": samples[0], "y": samples[1], "batch_size": 16, "verbose": 0}


@pytest.fixture
def model_file(tmp_path, perceptron):
    """A sound `.keras` file."""
    perceptron.save(tmp_path / "sound.keras")
    return tmp_path / "sound.keras"


@pytest.fixture
def members(model_file):
    """The members of that file, name -> content."""
    with zipfile.ZipFile(model_file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def marker(tmp_path):
    """A file that exists only if code in a hostile file ran."""
    return tmp_path / "code-was-run"


@pytest.fixture
def load(tmp_path):
    """Writes a recipe into the test's folder and loads it."""

    def write_and_load(text, overrides=None):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return load_recipe(path, overrides)

    return write_and_load


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """Keras's precision, of models, losses and inputs, while the test runs."""
    former = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(request.param)
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx(former[0])
    keras.config.set_dtype_policy(former[1])


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command line in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run_in_folder(*arguments):
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_in_folder


@pytest.fixture
def without_primes(monkeypatch):
    """Codes the texts of packed files without learning usual ones first: most of the time of small files."""
    from prunekit.delivery.packing import decoder, encoder

    monkeypatch.setattr(decoder, "PRIMES", dict.fromkeys(decoder.PRIMES, ""))
    monkeypatch.setattr(encoder, "PRIMES", decoder.PRIMES)
