"""What the doctor says of this machine is so: its devices, packages, memory and precision."""

import importlib.metadata
import os
import sys
import types
from pathlib import Path

import keras
import pytest
from examinations import checks_of, shown

import prunekit
from prunekit import doctor
from prunekit.core.runtime import compilation, environment
from prunekit.recipe.run import build_report

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="compares with what TensorFlow says")


@pytest.fixture
def here():
    return environment.describe()


class TestTheEnvironment:
    def test_devices_are_those_that_tensorflow_lists(self, here):
        visible = tf.config.get_visible_devices()
        assert [(f"/physical_device:{device.name}", device.kind) for device in here.devices] == [
            (device.name, device.device_type) for device in visible
        ]
        for device in here.devices:
            with tf.device(device.name):
                assert tf.ones(1).device.endswith(device.name)

    def test_versions_are_those_of_the_installed_packages(self, here):
        assert here.versions["python"] == ".".join(map(str, sys.version_info[:3]))
        assert here.versions["prunekit"] == prunekit.__version__
        assert here.versions["keras"] == keras.__version__
        assert here.versions["tensorflow"] == tf.__version__
        for package in environment.PACKAGES:
            try:
                expected = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                expected = None
            assert here.versions[package] == expected

    def test_a_run_records_the_same_versions(self, here):
        recorded = build_report.versions()
        assert {name: recorded[name] for name in recorded if name in here.versions}.items() <= here.versions.items()
        assert {"python", "prunekit", "keras", "tensorflow", "numpy"} <= recorded.keys()

    def test_cores_and_memory_are_those_of_this_process(self, here):
        if hasattr(os, "sched_getaffinity"):
            assert here.cores == len(os.sched_getaffinity(0))
        if Path("/proc/meminfo").exists():
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            assert here.memory == pages
            assert 0 < here.memory_available <= here.memory

    @pytest.mark.parametrize("text", [None, "", "MemTotal\n", "MemTotal:\n", "MemFree: 3 kB\n", "\xff"])
    def test_memory_is_unknown_where_the_system_does_not_say(self, monkeypatch, tmp_path, text):
        file = tmp_path / "meminfo"
        if text is not None:
            file.write_text(text, encoding="latin-1")
        monkeypatch.setattr(environment, "_MEMORY", file)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        found = doctor.examine()
        assert (found.environment.memory, found.environment.memory_available) == (None, None)
        assert found.environment.cores == os.cpu_count()
        assert found.ok and "memory" not in shown(found)

    def test_precision_is_that_of_keras(self):
        former = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            here = environment.describe()
        finally:
            keras.config.set_dtype_policy(former)
        assert (here.floatx, here.dtype_policy) == ("float32", "mixed_bfloat16")

    def test_a_strategy_in_scope_is_named_with_its_replicas(self, here):
        assert (here.strategy, here.replicas) == (None, 1)
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            found = doctor.examine()
        assert (found.environment.strategy, found.environment.replicas) == ("OneDeviceStrategy", 1)
        assert checks_of(found)["pruning in fit"].detail.endswith(", OneDeviceStrategy with 1 replica")

    def test_xla_is_tried_and_not_believed(self, monkeypatch):
        compiled = []
        original = compilation.OpenFunction.__init__

        def spied(self, function, **options):
            compiled.append(options.get("xla"))
            original(self, function, **options)

        monkeypatch.setattr(compilation.OpenFunction, "__init__", spied)
        here = environment.describe()
        assert compiled == [True]
        assert (here.xla, here.xla_problem) == (True, None)

    def test_operations_run_on_the_first_accelerator_if_there_is_one(self):
        cpu, gpu, other = (environment.Device(name, name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1"))
        for devices, expected in (((cpu, gpu, other), "GPU:0"), ((cpu,), "CPU:0"), ((), None)):
            here = types.SimpleNamespace(devices=devices)
            assert environment.Environment.main_device.fget(here) == expected

    def test_a_graphics_card_is_described_with_its_memory(self, monkeypatch):
        card = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")
        details = {"device_name": "NVIDIA X", "compute_capability": (9, 0)}
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda: [card])
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
        monkeypatch.setattr(environment.ctypes, "CDLL", FakeDriver)
        found = doctor.examine()
        assert found.environment.devices == (environment.Device("GPU:1", "GPU", "NVIDIA X", 80 * 10**9, "9.0"),)
        assert "GPU:1, NVIDIA X, 80.0 GB, compute capability 9.0" in shown(found)
        assert checks_of(found)["pruning in fit"].detail == "tensorflow on GPU:1"

    @pytest.mark.parametrize("failing", ["load", "cuInit", "cuDeviceGet", "cuDeviceTotalMem_v2"])
    def test_memory_of_a_card_is_unknown_where_the_driver_does_not_say(self, monkeypatch, failing):
        def load(name):
            if failing == "load":
                raise OSError(name)
            driver = FakeDriver(name)
            setattr(driver, failing, lambda *_: 100)
            return driver

        monkeypatch.setattr(environment.ctypes, "CDLL", load)
        assert environment._cuda_memory(1) is None


class FakeDriver:
    """A CUDA driver with a card of 80 GB as its device 1."""

    def __init__(self, name):
        self.name = name

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 40 + index
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 80 * 10**9
        return 0 if device.value == 41 else 101
