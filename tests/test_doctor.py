"""The doctor: what is missing is told with its remedy."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import pytest
from examinations import checks_of, shown

import prunekit
from prunekit import cli, doctor
from prunekit.core.runtime import compilation, environment
from prunekit.recipe.datasets import builtin_files
from prunekit.recipe.datasets.builtin_files import GET_DIGITS, GET_FASHION

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="compares with what TensorFlow says")

ROOT = Path(prunekit.__file__).parent.parent
TRAINING = ("pruning in fit", "pruning in tape loops")
ESSENTIAL = ("Keras 3", *TRAINING, "one-shot pruning")
SWITCH = "run with KERAS_BACKEND=tensorflow"


@pytest.fixture(autouse=True)
def fashion_mnist(monkeypatch, tmp_path_factory):
    """Files of Fashion-MNIST, whether or not this machine has them."""
    home = tmp_path_factory.mktemp("keras")
    folder = home / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for stem in builtin_files.FASHION_FILES.values():
        (folder / f"{stem}.gz").touch()
    monkeypatch.setattr(builtin_files, "DEBIAN_FASHION", home / "nowhere")
    monkeypatch.setenv("KERAS_HOME", str(home))
    return folder


@pytest.fixture
def without(monkeypatch):
    """Makes packages vanish: a finder refuses to import their modules, and they have no metadata."""

    def vanish(package, module):
        class Refusing:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name.partition(".")[0] == module:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Refusing, *sys.meta_path])
        unlist(package)

    def unlist(package):
        version = importlib.metadata.version

        def version_of(name):
            if name == package:
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(importlib.metadata, "version", version_of)

    return vanish


@pytest.fixture
def on_jax(monkeypatch):
    """Keras says that it runs on JAX, and a stand-in for JAX has one graphics card."""
    card = types.SimpleNamespace(
        platform="gpu",
        id=0,
        device_kind="NVIDIA X",
        compute_capability="9.0",
        memory_stats=lambda: {"bytes_limit": 60 * 10**9},
    )
    fake = types.SimpleNamespace(devices=lambda: [card], jit=lambda function: function)
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    return fake


@pytest.fixture
def on_torch(monkeypatch):
    """Keras says that it runs on PyTorch, and a stand-in for PyTorch has no graphics card."""
    cuda = types.SimpleNamespace(device_count=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")


class TestWhatIsMissing:
    def test_on_this_machine_models_can_be_pruned_and_trained(self):
        found = doctor.examine()
        assert found.ok
        assert [check.name for check in found.checks if check.essential] == list(ESSENTIAL)
        assert {check.status for check in found.checks if check.essential} == {"ok"}

    @pytest.mark.parametrize(
        ("package", "module", "check", "remedy"),
        [
            ("scikit-learn", "sklearn", "data: digits", re.escape(GET_DIGITS)),
            ("matplotlib", "matplotlib", "pictures in reports", r"pip install 'matplotlib(>=[\d.]+)?'"),
            ("ai-edge-litert", "ai_edge_litert", "LiteRT export", r"pip install 'ai-edge-litert(>=[\d.]+)?'"),
        ],
    )
    def test_a_missing_package_is_reported_with_what_to_install(self, without, package, module, check, remedy):
        without(package, module)
        found = doctor.examine()
        row = checks_of(found)[check]
        assert row.status == "missing" and "not installed" in row.detail and package in row.detail
        assert re.fullmatch(remedy, row.remedy)
        assert [other.name for other in found.missing] == [check]
        assert found.ok
        if package in found.environment.versions:
            assert found.environment.versions[package] is None

    def test_a_broken_package_is_reported_with_its_own_message(self, monkeypatch):
        def broken(name):
            if name == "ai_edge_litert.interpreter":
                raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32'\n not found")
            return module(name)

        module = doctor.importlib.import_module
        monkeypatch.setattr(doctor.importlib, "import_module", broken)
        row = checks_of(doctor.examine())["LiteRT export"]
        assert row.status == "missing" and "GLIBCXX_3.4.32' not found" in row.detail

    def test_a_package_that_lacks_another_names_that_one(self, monkeypatch):
        def broken(name):
            if name == "sklearn.datasets":
                raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
            return module(name)

        module = doctor.importlib.import_module
        monkeypatch.setattr(doctor.importlib, "import_module", broken)
        assert checks_of(doctor.examine())["data: digits"].detail == "scikit-learn: No module named 'scipy'"

    def test_fashion_mnist_is_looked_for_where_recipes_look(self, fashion_mnist):
        row = checks_of(doctor.examine())["data: fashion-mnist"]
        assert (row.status, row.detail) == ("ok", str(fashion_mnist))
        next(fashion_mnist.iterdir()).unlink()
        row = checks_of(doctor.examine())["data: fashion-mnist"]
        assert (row.status, row.remedy) == ("missing", GET_FASHION)
        assert row.remedy.startswith("apt install dataset-fashion-mnist")

    def test_without_built_in_recipes_the_installation_is_broken(self, monkeypatch):
        monkeypatch.setattr(doctor, "builtin_recipes", dict)
        row = checks_of(doctor.examine())["recipes"]
        assert row.status == "missing" and row.remedy.startswith("pip install")

    def test_where_xla_fails_its_reason_is_one_line(self, monkeypatch):
        def fail(self, *arguments):
            raise tf.errors.InternalError(None, None, "\nlibdevice not found at ./libdevice.10.bc\n\t [[{{node x}}]]")

        monkeypatch.setattr(compilation.OpenFunction, "__call__", fail)
        found = doctor.examine()
        assert found.environment.xla is False
        assert found.environment.xla_problem == "libdevice not found at ./libdevice.10.bc"
        row = checks_of(found)["XLA"]
        assert (row.detail, row.remedy) == (found.environment.xla_problem, "compile models with jit_compile=False")
        assert found.ok

    def test_xla_that_computes_something_else_has_failed(self, monkeypatch):
        monkeypatch.setattr(compilation.OpenFunction, "__call__", lambda self, x: x)
        here = environment.describe()
        assert here.xla is False and "[1.0, 3.0]" in here.xla_problem

    def test_a_long_reason_is_shortened_for_people_only(self, monkeypatch):
        def fail(self, *arguments):
            raise RuntimeError("x" * 5000)

        monkeypatch.setattr(compilation.OpenFunction, "__call__", fail)
        found = doctor.examine()
        assert len(found.environment.xla_problem) == 5000
        assert len(checks_of(found)["XLA"].detail) < 200

    def test_a_loop_on_several_replicas_is_reported_before_it_is_refused(self, monkeypatch):
        monkeypatch.setattr(environment, "_distribution", lambda backend: ("MirroredStrategy", 4))
        found = doctor.examine()
        row = checks_of(found)["pruning in tape loops"]
        assert row.status == "missing" and "MirroredStrategy has 4" in row.detail
        assert "PruningCallback" in row.remedy and found.ok


class TestOtherBackends:
    @pytest.mark.parametrize("backend", ["jax", "torch"])
    def test_training_and_one_shot_pruning_are_there_and_litert_export_is_not(self, request, backend):
        request.getfixturevalue(f"on_{backend}")
        found = doctor.examine()
        rows = checks_of(found)
        assert found.ok and found.environment.backend == backend
        for name in TRAINING:
            assert backend in rows[name].detail and rows[name].status == "ok"
        assert rows["LiteRT export"].remedy == SWITCH
        assert rows["one-shot pruning"].status == rows["Keras 3"].status == "ok"

    def test_where_tensorflow_is_not_installed_either_that_comes_first(self, on_jax, without):
        without("tensorflow", "no_module_at_all")
        row = checks_of(doctor.examine())["LiteRT export"]
        assert re.fullmatch(rf"pip install 'tensorflow(>=[\d.]+)?', and {SWITCH}", row.remedy)

    def test_the_devices_are_those_of_the_backend(self, on_jax):
        here = environment.describe()
        assert here.devices == (environment.Device("GPU:0", "GPU", "NVIDIA X", 60 * 10**9, "9.0"),)
        assert here.xla is True and here.replicas is None

    def test_pytorch_uses_no_xla(self, on_torch):
        found = doctor.examine()
        assert found.environment.xla is None
        assert checks_of(found)["XLA"].detail == "not used by Keras on torch"

    def test_a_backend_without_devices_is_described_too(self, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
        found = doctor.examine()
        assert (found.environment.devices, found.environment.problem, found.ok) == ((), None, False)
        assert checks_of(found)["one-shot pruning"].detail == "numpy"
        for name in TRAINING:
            assert "numpy" in checks_of(found)[name].detail and checks_of(found)[name].remedy == SWITCH
        assert "numpy" in shown(found)


class TestKerasThatDoesNotStart:
    def test_keras_2_is_refused_with_what_to_install(self, monkeypatch):
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.15.0" if name == "keras" else version(name))
        monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(__version__="2.15.0"))
        found = doctor.examine()
        assert not found.ok
        row = checks_of(found)["Keras 3"]
        assert "Received: Keras 2.15.0" in row.detail
        assert re.fullmatch(r"pip install 'keras(>=[\d.]+)?'", row.remedy)

    def test_without_tensorflow_what_to_install_is_named(self, monkeypatch, without):
        monkeypatch.setitem(sys.modules, "keras", None)
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
        without("tensorflow", "no_module_at_all")
        row = checks_of(doctor.examine())["Keras 3"]
        assert re.fullmatch(r"pip install 'tensorflow(>=[\d.]+)?'", row.remedy)

    def test_a_backend_that_was_asked_for_is_the_first_suspect(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "keras", None)
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        row = checks_of(doctor.examine())["Keras 3"]
        assert row.detail.startswith("with KERAS_BACKEND=jax: ") and row.remedy == SWITCH

    def test_parts_that_need_keras_are_named_and_the_rest_is_reported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "keras", None)
        found = doctor.examine()
        rows = checks_of(found)
        for name in (*TRAINING, "one-shot pruning", "XLA", "LiteRT export", "recipes"):
            assert (rows[name].status, rows[name].remedy) == ("missing", "as for Keras 3")
        assert rows["data: digits"].status == rows["pictures in reports"].status == "ok"
        assert found.environment.backend is None and found.environment.versions["numpy"] is not None
        assert "Models cannot be pruned and trained here. Missing: Keras 3, " in shown(found, width=500)

    def test_a_backend_whose_devices_fail_does_not_start(self, monkeypatch):
        def fail():
            raise RuntimeError("CUDA_ERROR_UNKNOWN: unknown error")

        monkeypatch.setattr(tf.config, "get_visible_devices", fail)
        found = doctor.examine()
        assert not found.ok and "CUDA_ERROR_UNKNOWN" in found.environment.problem


class TestForPeople:
    def test_in_a_pipe_each_check_is_one_line_however_long(self, without, monkeypatch):
        without("scikit-learn", "sklearn")
        found = doctor.examine()
        lines = shown(found, width=40).splitlines()
        for check in found.checks:
            (line,) = [line for line in lines if re.match(rf"{check.status} +{re.escape(check.name)}  ", line)]
            assert check.detail in line and (check.remedy or "") in line
        assert lines[-1] == "Models can be pruned and trained here. Missing for the rest: data: digits."

    def test_on_a_terminal_nothing_is_wider_than_it_and_nothing_is_lost(self, without):
        without("scikit-learn", "sklearn")
        found = doctor.examine()
        text = shown(found, terminal=True)
        assert max(map(len, text.splitlines())) <= 80
        joined = "".join(text.split())
        for check in found.checks:
            for part in (check.detail, check.remedy or ""):
                assert "".join(part.split()) in joined

    def test_what_a_driver_calls_its_card_cannot_write_to_the_terminal(self, monkeypatch):
        device = environment.Device("GPU:0", "GPU", "\x1b[31m[bold]evil")
        assert doctor._device(device) == "GPU:0, \ufffd[31m[bold]evil"


class TestTheCommand:
    @pytest.fixture
    def run(self, capsys):
        def run(*arguments):
            code = cli.run(["doctor", *arguments])
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        return run

    def test_it_tells_the_environment_and_the_checks(self, run):
        code, out, err = run()
        assert (code, err) == (0, "")
        assert f"keras {keras.__version__}, tensorflow {tf.__version__}, " in out
        assert re.search(r"^ok +pruning in fit +tensorflow on CPU:0$", out, re.MULTILINE)

    def test_json_is_the_whole_examination(self, run):
        code, out, err = run("--json")
        answer, found = json.loads(out), doctor.examine().to_dict()
        assert (code, err) == (0, "")
        for values in (answer, found):
            values["environment"].pop("memory_available")
        assert answer == found
        assert [*answer] == ["doctor_version", "ok", "environment", "checks"]
        assert {tuple(row) for row in answer["checks"]} == {("name", "status", "detail", "remedy", "essential")}

    def test_the_exit_code_is_1_where_training_is_impossible(self, run, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
        code, out, err = run("--json")
        assert (code, err, json.loads(out)["ok"]) == (1, "", False)
        code, out, err = run()
        assert (code, err) == (1, "") and "Models cannot be pruned and trained here." in out

    @pytest.mark.parametrize("backend", ["tensorflow", "nonsense"])
    @pytest.mark.short(cases=1)
    def test_nothing_but_the_command_prints(self, backend, tmp_path):
        environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        environ |= {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, "-m", "prunekit.cli", "doctor", "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["ok"]) == ((0, True) if backend == "tensorflow" else (1, False))
        assert answer["environment"]["backend"] == ("tensorflow" if backend == "tensorflow" else None)
