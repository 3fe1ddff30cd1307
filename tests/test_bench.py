"""scripts/bench: the page it writes has all its parts; never how fast anything is."""

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "scripts" / "benchmarks"
# What sections share, in order: a module imports only from modules before it. A new module is a new name here.
SHARED = "figures tables machine workers models integer_networks first_steps contestants trainings".split()
TOP = ["page", "__main__"]
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def rank(parts):
    """The place of a module in the order; all sections have the same, so that none imports another."""
    if parts[0] == "sections":
        return len(SHARED)
    return SHARED.index(parts[0]) if parts[0] in SHARED else len(SHARED) + 1 + TOP.index(parts[0])


def imports_of(path):
    """The modules of the benchmark that a file imports, at its top or in a function, as (folder, module)."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1:] for name in names if name.split(".")[0] == "benchmarks")


def test_what_scripts_import_from_the_package_exists():
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "prunekit":
                for alias in node.names:
                    assert pkgutil.resolve_name(f"{node.module}.{alias.name}") is not None, path


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_of_the_benchmark_imports_only_from_below(path):
    targets = list(imports_of(PACKAGE / path))
    if path.stem == "__init__":
        assert not targets, "packages re-export nothing"
        return
    for target in targets:
        assert rank(target) < rank(path.with_suffix("").parts), f"{path} imports {'.'.join(target)}, which is above it"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name == "sections"], ids=str)
def test_a_section_is_on_the_page(path):
    page = {".".join(target) for target in imports_of(PACKAGE / "page.py")}
    assert path.stem == "__init__" or f"sections.{path.stem}" in page


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(page, raw figures) of a run on a tiny perceptron."""
    folder = tmp_path_factory.mktemp("bench")
    page, raw = folder / "docs" / "benchmarks.md", folder / "raw.json"
    subprocess.run(
        [ROOT / "scripts" / "bench", "--quick", "--smoke", "--models", "perceptron", "--output", page, "--json", raw],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        timeout=600,
    )
    return page.read_text(encoding="utf-8"), json.loads(raw.read_text(encoding="utf-8"))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_every_contestant_does_all_its_steps_and_mask_updates_are_distinguished(smoke):
    trainings = smoke[1]["models"]["perceptron"]["trainings"]
    updates = {
        library: {name: (len(run["steps"]), sum(row[3] for row in run["steps"])) for name, run in runs.items()}
        for library, runs in trainings.items()
    }
    # prunekit decides before the first step as well, and always at the end of its schedule.
    assert updates == {
        "prunekit": {"plain": (12, 0), "control": (12, 0), "100": (12, 2), "10": (12, 3), "1": (10, 10)},
        "tfmot": {"plain": (12, 0), "10": (12, 1), "1": (10, 10)},
    }


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_page_names_command_and_machine_and_has_every_table(smoke):
    page, raw = smoke
    assert "`scripts/bench --quick --smoke --models perceptron`" in page
    assert "cores, Linux, Python 3." in page or "cores, Darwin, Python 3." in page
    assert "the figures mean nothing" in page
    assert os.uname().nodename not in page
    for heading in (
        "## Wanted and measured",
        "## Perceptron",
        "## Finding the largest fifth",
        "## Cached prefixes",
        "## Backward in parts",
        "## Quantization",
        "## Scale",
        "## Backends",
        "## Start: time before the first step",
        "## Start-up",
        "## How it is measured",
    ):
        assert heading in page
    assert set(raw["startup"]) >= {"prunekit --help", "prunekit check digits"}
    rows = [line for line in page.splitlines() if line.startswith("| prunekit, frequency")]
    assert [row.split("|")[1].strip() for row in rows] == [
        *(f"prunekit, frequency {frequency}" for frequency in (100, 10, 1)),
        "prunekit, frequency 2",
    ]
    assert all(row["peak"] >= row["before"] > 0 for row in raw["models"]["perceptron"]["memories"].values())


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_section_measured_by_itself_takes_the_place_of_the_old_one(smoke, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks import page as pages

    page, raw = tmp_path / "page.md", tmp_path / "raw.json"
    old = smoke[0].replace("## Backends", "## Something else")
    page.write_text(old, encoding="utf-8")
    command = [ROOT / "scripts" / "bench", "--smoke", "--only", "backends", "--output", page, "--json", raw]
    # The smoke test of the whole page measures TensorFlow.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=environment, timeout=300)
    # Once more, into the page that has the section now.
    new = pages.updated(page.read_text(encoding="utf-8"), json.loads(raw.read_text(encoding="utf-8")))
    headings = [[line for line in one.splitlines() if line.startswith("## ")] for one in (old, new)]
    place = headings[0].index("## Start-up of the command line")
    assert headings[1] == [*headings[0][:place], "## Backends", *headings[0][place:]]
    assert new.count("Measured by `scripts/bench --smoke --only backends` on ") == 1
    assert old.partition("## Start-up")[0] == new.partition("## Backends")[0]
    assert old.partition("## Start-up")[2] == new.partition("## Start-up")[2]


def test_there_must_be_a_page_to_measure_a_section_of(tmp_path):
    command = [ROOT / "scripts" / "bench", "--only", "scale", "--output", tmp_path / "none.md"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--only replaces sections of a page. Received: no" in done.stderr
    (tmp_path / "none.md").write_text("# Notes\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"{tmp_path / 'none.md'}, which is none" in done.stderr
    assert (tmp_path / "none.md").read_text() == "# Notes\n"


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_every_table_of_the_page_is_rectangular(smoke):
    widths: set[int] = set()
    for line in [*smoke[0].splitlines(), ""]:
        if line.startswith("|"):
            widths.add(line.count("|"))
        else:
            assert len(widths) <= 1
            widths = set()


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks import workers

    return workers


def test_shared_workers_are_one_process_for_each_environment(workers):
    with workers.Workers(shared=True) as shared:
        same = {shared.call(os.getpid, {}), *shared.map(os.getpid, [{}, {}], at_once=2)}
        other = shared.call(os.getpid, {}, {"PRUNEKIT_BENCH": "1"})
        assert len(same) == 1 and other not in same
    with workers.Workers(shared=False) as apart:
        assert len({*apart.map(os.getpid, [{}, {}], at_once=2)} - same) == 2


def test_a_worker_gives_the_items_of_a_generator_one_by_one_and_does_the_next_task(workers, tmp_path):
    (tmp_path / "folder").mkdir()
    with workers.Worker() as worker:
        items = worker.items(os.walk, top=str(tmp_path))
        assert next(items) == [str(tmp_path), ["folder"], []]
        assert list(items) == [[str(tmp_path / "folder"), [], []]]
        assert worker.call(json.loads, s="[1]") == [1]


def test_a_worker_that_fails_is_reported_with_what_it_wrote(workers):
    with workers.Worker() as worker, pytest.raises(SystemExit, match="a worker ended early(?s:.*)JSONDecodeError"):
        worker.call(json.loads, s="not JSON")


def test_memory_is_measured_in_copies_of_the_process():
    # In a process without threads, as the worker that does it is.
    code = (
        "import os; from benchmarks.sections.backward_parts import in_a_process_of_its_own as own\n"
        "assert len({os.getpid(), *[wait() for wait in [own(os.getpid), own(os.getpid)]]}) == 3\n"
        "try: own(lambda: 1 / 0)()\n"
        "except RuntimeError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "A measurement of memory ended early.\n", done.stderr


@pytest.fixture
def start(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks.sections import start

    return start


def test_the_section_on_the_start_says_met_only_where_the_figures_do(start):
    size = {"weights": 410_000, "kernels": 36}
    one_shot = {name: [size | {"first": 1.0, "again": 0.4, "another": 0.9}] * 3 for name in start.ONE_SHOT}
    # What belongs together was measured in one turn: each is 2 s longer than the one before.
    fits = [
        {"plain": size | {"seconds": [t + 5.0, t + 1.0]}, "pruned": size | {"seconds": [t + 10.0, t + 1.5]}}
        for t in (0.0, 2.0, 4.0)
    ]
    found = {"one_shot": one_shot, "fits": {name: fits for name in start.FITS}}
    found["updates"] = {"prunekit": [0.02, 0.03, 0.04], "tfmot": [0.04, 0.06, 0.08]}
    lines = start.section(found).splitlines()
    assert "| MobileNetV2: one-shot `pk.prune`, s | at most 0.5 | 1.00 | **not met**, 2.00 times the limit |" in lines
    assert "| NASNetMobile: one-shot `pk.prune`, s | at most 2 | 1.00 | met |" in lines
    assert "| MobileNetV2: the second callback adds, s | at most 1 | 0.50 | met |" in lines
    first = "the first callback adds, ratio to tracing | at most 1.3 | 1.25 | met |"
    assert f"| MobileNetV2: {first}" in lines and f"| ResNet-20: {first}" in lines
    (line,) = (line for line in lines if line.startswith("| ResNet-20: mask update"))
    assert line.endswith("| at least 1 | 2.00 | met |")
    found["updates"]["prunekit"] = [0.08]
    assert "| at least 1 | 0.75 | **not met** |" in start.section(found)


@pytest.fixture
def quantization(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks.sections import quantization

    return quantization


def test_the_section_on_quantization_compares_turns_and_says_met_only_where_the_figures_do(quantization):
    def calibration(times):
        ways = {"predict": 1.0, "quantize": times}
        # What belongs together was measured in one turn: each takes 10 times as long as the one before.
        return {
            way: {"wall": [factor * t for t in (1.0, 10.0, 100.0)], "cpu": [2.0], "peak": factor * 1e9}
            for way, factor in ways.items()
        }

    def run(seconds):
        # The first round traces.
        return {"steps": [(0, 9.0, 9.0, False), *((n, n * seconds, 2 * n * seconds, False) for n in (1, 2, 3))]}

    start = [[{"layers": 70, "seconds": [4.0 * t, 1.0]}, {"layers": 70, "seconds": [5.0 * t, 3.0]}] for t in (1, 2, 3)]
    file = {"bytes": 1234, "gzip": 1000, "seconds": [0.002, 0.004]}
    found = {
        "calibrations": [calibration(1.5), calibration(3.0), calibration(20.0)],
        "steps": {name: {"plain": run(0.1), "integers": run(0.15)} for name in quantization.TRAINED},
        "starts": {name: start for name in quantization.TRAINED},
        "files": {
            name: {
                title: file | {"seconds": [factor * one for one in file["seconds"]]}
                for title, factor in zip(quantization.FILE_TITLES, (1.0, 0.5, 0.25), strict=True)
            }
            for name in quantization.TRAINED
        },
    }
    found["calibrations"][0]["quantize"]["wall"] = [1.2, 1.5, 60.0]
    lines = quantization.section(found).splitlines()
    # Beside the fastest `predict`, which took 1 s: the median of 1.2, 1.5 and 60 s.
    assert "| ResNet50, 224x224: calibration, ratio to the fastest `predict` | at most 2 | 1.50 | met |" in lines
    (line,) = (line for line in lines if line.startswith("| ResNet-20, 32x32: 4-bit weights, GPTQ"))
    assert line.endswith("| 20.00 (20.00 to 20.00) | 1.00 (1.00 to 1.00) | 1.00, 20.00 |")
    (line,) = (line for line in lines if line.startswith("| ResNet-20, 32x32: on integers |"))
    assert line.endswith("| 300.0 (150.0 to 450.0) | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) |")
    (line,) = (line for line in lines if line.startswith("| MobileNetV2 0.35, 96x96, 70 layers"))
    assert "| 8.0 (4.0 to 12.0) | 10.0 (5.0 to 15.0) | 1.25 (1.25 to 1.25) |" in line
    (line,) = (line for line in lines if line.startswith("| ResNet-20, 32x32: int8, `pk.quantize`"))
    assert "| 1,234 | 1,000 |" in line and line.endswith("| 0.25 (0.25 to 0.25) |")
    found["calibrations"][0]["quantize"]["wall"] = [1.2, 2.5, 60.0]
    assert "| 2.50 | **not met**, 1.25 times the limit |" in quantization.section(found)


def test_the_section_on_integer_files_compares_turns_with_the_converters_and_names_files_that_are_missing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks.sections import integer_files

    file = {"bytes": 1234, "errors": [0.00125, 0.001, 0.002], "operations": 9, "floats": 2}
    found = {
        "plain": {"prunekit": file | {"seconds": [1e-6, 4e-6]}, "converter": file | {"seconds": [2e-6, 8e-6]}},
        "other": {"prunekit": file | {"seconds": [1e-6, 4e-6]}, "converter": "ValueError: no"},
    }
    lines = integer_files.section(found).splitlines()
    assert "| plain: prunekit | 1,234 | 2.5 | 0.50 (0.50 to 0.50) | 9 | 2 | 0.0013 (0.0010 to 0.0020) |" in lines
    assert "| other: prunekit | 1,234 | 2.5 | - | 9 | 2 | 0.0013 (0.0010 to 0.0020) |" in lines
    assert "| other: converter | no file | - | - | - | - | - |" in lines
    assert sum("ai-edge-quantizer |" in line for line in lines) == 0
    assert "ai-edge-quantizer was not installed, so that its rows are missing." in lines
    found["plain"]["ai-edge-quantizer"] = "RuntimeError: no"
    lines = integer_files.section(found).splitlines()
    assert "| plain: ai-edge-quantizer | no file | - | - | - | - | - |" in lines
    assert not any("not installed" in line for line in lines)


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks.sections import scale

    return scale


def scale_row(operation, weights, layers, seconds, times, keeps=True):
    task = {"operation": operation, "weights": weights, "layers": layers, "keeps": keeps}
    found = {"weights": weights, "seconds": seconds, "peak": times * 4 * weights, "model": 4.4 * weights}
    return {"task": task, "found": found}


def test_the_section_on_scale_says_met_and_linear_only_where_the_figures_do(scale):
    rows = [scale_row("prune", size, 12, size / 1e8, 2.4) for size in scale.SIZES]
    rows += [scale_row("save", size, 12, (size / 1e8) ** 2, 2.6) for size in scale.SIZES]
    rows += [scale_row("prune", 100_000_000, 1, 2.0, 5.5), scale_row("prune", 100_000_000, 1, 3.0, 3.5, keeps=False)]
    lines = scale.section(rows, "x.png").splitlines()
    assert "| 100 M in one layer | 1.10x |  | 2.0 s, 5.50x |  |  |  |" in lines
    assert "| 100 M in one layer, freed memory returned | 1.10x |  | 3.0 s, 3.50x |  |  |  |" in lines
    assert "| pk.prune to 90 % | 2.40x | met | 5.50x | **not met**, 2.20 times the limit |" in lines
    assert "| model.save (.keras) | 2.60x | **not met**, 1.04 times the limit |  |  |" in lines
    (line,) = (line for line in lines if line.startswith("| pk.prune") and " GB" in line)
    assert (
        line
        == "| pk.prune to 90 % | 1.00 s, 0.96 GB | 1.00 s, 0.96 GB | 1.00 s, 0.96 GB | linear (1.00) | linear (1.00) |"
    )
    (line,) = (line for line in lines if line.startswith("| model.save") and " GB" in line)
    assert line.endswith("| not linear (30.00): more per weight in larger models | linear (1.00) |")
    # 1.6 GB times what one layer takes beyond 1.5.
    assert "on the way 6 GB" in lines[-1] and "66 GB in all" in lines[-1] and "186 GB together" in lines[-1]


def test_the_picture_of_scale_has_each_size_once(scale, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    lines, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, x, *rest, **more: lines.append(x) or plot(self, x, *rest, **more))
    rows = [scale_row(one, size, 12, size / 1e8, 2.4) for size in scale.SIZES for one in scale.OPERATIONS]
    others = [(12, False), (1, True), (1, False)]
    rows += [scale_row("prune", 100_000_000, layers, 2.0, 5.5, keeps) for layers, keeps in others]
    scale.picture(rows, tmp_path / "scale.png")
    assert len(lines) == 2 * len(scale.OPERATIONS) + 1 and all(line == list(scale.SIZES) for line in lines)
    assert (tmp_path / "scale.png").stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_pruning_peaks_below_2_6_times_the_weights():
    # The default compares all weights: once their bytes for the model, once for the importances, masks a quarter. 2.53
    # was measured, and 2.14 where the allocation reads no importances.
    # Memory and not time: three runs beside others on a busy machine took 2.21 to 2.35. On another machine glibc kept
    # freed arrays, 4.7 times the weights in all; with a fixed threshold it returns them, and 1.94 was measured.
    code = "from benchmarks.sections import scale as s; r = s.measure('prune', 60_000_000, 12)"
    code += "; print('@', s.ratio(r))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}",
            "CUDA_VISIBLE_DEVICES": "-1",
            "MALLOC_MMAP_THRESHOLD_": "1048576",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1.0 < float(done.stdout.rpartition("@")[2]) < 2.6
