"""Models of `keras.applications` in recipes: named and checked without Keras, built alike for the same seed."""

import inspect
import json
import subprocess
import sys

import keras
import pytest

from prunekit.anatomy.files.digests import model_digest
from prunekit.recipe.run.plan import plan
from prunekit.recipe.run.runner import compress, verify
from prunekit.recipe.settings import applications as module
from prunekit.recipe.settings.applications import REQUIRED, applications, arguments_of
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.state.models import build_model
from prunekit.recipe.sweep.sweep import sweep
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.text.presence import check_named_files

SMALL = {"application": "MobileNet", "input_shape": [32, 32, 3], "classes": 10, "arguments": {"alpha": 0.25}}
PRUNE = {"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}}


def source(**others):
    return {"version": 1, "model": {**SMALL, **others}, "steps": [PRUNE]}


def of_keras():
    return {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}


@pytest.fixture(params=["source", "import"])
def way(request, monkeypatch):
    """Names and arguments are read from Keras's source; where its files lie elsewhere, Keras is imported."""
    applications.cache_clear(), arguments_of.cache_clear()
    if request.param == "import":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    yield
    applications.cache_clear(), arguments_of.cache_clear()


def test_names_and_arguments_are_those_of_the_installed_keras(way):
    assert list(applications()) == sorted(of_keras())
    for name, function in of_keras().items():
        parameters = inspect.signature(function).parameters
        assert arguments_of(name) == {key: one.default for key, one in parameters.items()}, name


def test_arguments_without_a_plain_default_are_found(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "m.py").write_text("def Net(a, b=f(), *, c, d=2): ...\n")
    (tmp_path / "applications").mkdir()
    (tmp_path / "applications" / "__init__.py").write_text("from keras.src.m import Net as Net, helper as helper\n")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    applications.cache_clear()
    assert dict(applications()) == {"Net": "keras.src.m"}
    assert arguments_of("Net") == {"a": REQUIRED, "b": REQUIRED, "c": REQUIRED, "d": 2}
    applications.cache_clear(), arguments_of.cache_clear()


def test_a_recipe_with_an_application_is_checked_without_keras(tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps(source()))
    code = "import sys; from prunekit.cli import run; run(['check', 'r.yaml']); sys.exit('keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: application MobileNet" in done.stdout


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("{application: MobilNet}", 22, "unknown application 'MobilNet'. Did you mean 'MobileNet'"),
        ("{application: [1]}", 22, "text"),
        ("{application: MobileNet, arguments: {alpa: 0.5}}", 45, "unknown key 'alpa'. Did you mean 'alpha'"),
        ("{application: VGG16, arguments: {alpha: 0.5}}", 41, "unknown key 'alpha'"),
        ("{application: MobileNet, alpha: 0.5}", 40, "'alpha' belongs inside 'arguments'"),
        ("{application: MobileNet, alhpa: 0.5}", 33, "unknown key 'alhpa'"),
        ("{application: MobileNet, arguments: {classes: 5}}", 54, "'classes' belongs beside 'application'"),
        ("{application: MobileNet, arguments: {input_tensor: 5}}", 45, "unknown key 'input_tensor'"),
        ("{application: MobileNet, arguments: {alpha: big}}", 52, "expected a number. Received: 'big'"),
        ("{application: MobileNet, arguments: {alpha: true}}", 52, "expected a number. Received: true"),
        ("{application: MobileNet, arguments: {include_top: 1}}", 58, "expected true or false. Received: 1"),
        ("{application: MobileNet, arguments: {classifier_activation: 3}}", 68, "expected text or null. Received: 3"),
        ("{application: MobileNet, classes: 0}", 42, "greater than or equal to 1"),
        ("{application: MobileNet, input_shape: [32, 32]}", 46, "missing"),
        ("{application: MobileNet, input_shape: [32, 0, 3]}", 51, "greater than or equal to 1"),
        ("{application: MobileNet, weights: imagenett}", 42, "expected imagenet, null, or a file that ends in"),
        ("{application: MobileNet, weights: imagenet, classes: 10}", 61, "imagenet weights has 1000 classes"),
        ("{application: MobileNet, classes: 10, arguments: {include_top: false}}", 42, "there are no classes"),
        ("{builtin: digits-cnn, classes: 10}", 39, "'classes' needs 'application'"),
        ("{builtin: digits-cnn, arguments: {alpha: 1}}", 41, "'arguments' needs 'factory'"),
        ("{application: MobileNet, builtin: digits-cnn}", 22, "only one of .*builtin and application"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(tmp_path, line, column, message):
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\nmodel: {line}\nsteps: [prune: {{sparsity: 0.5}}]\n")
    with pytest.raises(RecipeError, match=message) as refused:
        load_recipe(path)
    assert (refused.value.line, refused.value.column) == (2, column)


def test_the_lock_file_holds_the_application_with_its_arguments():
    loaded = load_recipe(source(input_shape=[None, None, 3], weights="imagenet", classes=None))
    assert load_recipe(json.loads(json.dumps(loaded.model_dump(mode="json")))) == loaded
    again = load_recipe(source())
    assert again.model.input_shape == (32, 32, 3) and again.model.weights is None
    assert "alpha: 0.25" in dump_recipe(again)
    assert again.factories() == ()


@pytest.fixture(scope="module")
def built():
    return build_model(load_recipe(source()).model, seed=3)


def test_the_same_seed_gives_the_same_weights(built):
    assert built.input_shape == (None, 32, 32, 3) and built.output_shape == (None, 10)
    assert (
        built.count_params() == keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, classes=10).count_params()
    )
    again, other = (build_model(load_recipe(source()).model, seed) for seed in (3, 4))
    assert model_digest(built) == model_digest(again) != model_digest(other)


def test_weights_come_from_a_file(built, tmp_path):
    built.save_weights(tmp_path / "mine.weights.h5")
    built.save(tmp_path / "mine.keras")
    for name in ("mine.weights.h5", "mine.keras"):
        (tmp_path / "r.yaml").write_text(json.dumps(source(weights=name)))
        found = load_recipe(tmp_path / "r.yaml")
        assert found.model.weights == str(tmp_path / name)
        assert model_digest(build_model(found.model, seed=9)) == model_digest(built)
    (tmp_path / "r.yaml").write_text(json.dumps(source(weights="absent.h5")))
    with pytest.raises(RecipeError, match="model.weights: .*absent.h5"):
        check_named_files(load_recipe(tmp_path / "r.yaml"), tmp_path / "r.yaml")
    (tmp_path / "broken.weights.h5").write_bytes(b"no weights")
    for name, message in (("broken.weights.h5", "damaged"), ("absent.h5", "does not exist")):
        with pytest.raises(RecipeError, match=message):
            build_model(ModelSource.model_validate({**SMALL, "weights": str(tmp_path / name)}), seed=0)


def offline(*args, **kwargs):
    raise Exception("URL fetch failure on https://storage.googleapis.com/x.h5: None -- [Errno -2] Name not known")


def test_imagenet_weights_that_cannot_be_downloaded_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(keras.src.utils.file_utils, "get_file", offline)
    with pytest.raises(RecipeError) as refused:
        build_model(ModelSource(application="MobileNet", weights="imagenet"), seed=0)
    assert str(refused.value) == (
        "model: MobileNet with its imagenet weights, which Keras downloads, could not be built: URL fetch failure on "
        "https://storage.googleapis.com/x.h5: None -- [Errno -2] Name not known. Without a network, write the path of "
        "a file as 'weights', or null."
    )


def test_arguments_that_keras_refuses_are_one_line():
    with pytest.raises(RecipeError, match="model: MobileNet could not be built: Input size must be") as refused:
        build_model(ModelSource.model_validate({**SMALL, "input_shape": (8, 8, 3)}), seed=0)
    assert "\n" not in str(refused.value)
    with pytest.raises(RecipeError, match="`input_shape` should be .224, 224, 3.[^W]*$"):
        build_model(ModelSource(application="MobileNet", weights="imagenet", input_shape=(32, 32, 3)), seed=0)


def test_the_plan_says_that_keras_downloads(monkeypatch, built):
    monkeypatch.setattr("prunekit.recipe.run.preparation.build_model", lambda source, seed: built)
    found = plan(source(weights="imagenet", classes=None))
    assert found.notes[0] == (
        "Keras downloads the imagenet weights of MobileNet once, and keeps them in its cache folder."
    )
    assert not [note for note in plan(source()).notes if "download" in note]


@pytest.mark.thorough
def test_a_run_is_verified_resumed_and_swept(tmp_path):
    document = source(arguments={"alpha": "$alpha"}) | {"variables": {"alpha": 0.25}}
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    report = compress(tmp_path / "r.yaml", output=tmp_path / "run").report
    assert verify(tmp_path / "run").identical
    # The finished run counts as that of the recipe only if the model is built with the same bytes again.
    assert compress(tmp_path / "r.yaml", output=tmp_path / "run", resume=True).report.hashes == report.hashes
    assert sweep(tmp_path / "r.yaml", {"alpha": [0.25, 0.5]}, output=tmp_path / "swept").complete
