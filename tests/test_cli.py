"""The command line: what it prints, where, and with which exit code."""

import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
from command_lines import ENVIRONMENT, assert_mistake

import prunekit
import prunekit.delivery.reports
import prunekit.recipe.run
from prunekit import cli, terminal
from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.text.loader import RecipeError

HEAVY = ("tensorflow", "keras", "numpy", "jax", "torch", "tf_keras", "matplotlib", "sklearn")
ONE_SHOT = "version: 1\nname: once\nmodel: {builtin: digits-cnn}\nsteps: [prune: {sparsity: 0.5}]\n"


class Failure(Exception):
    def __init__(self, message, result):
        super().__init__(message)
        self.result = result


@dataclass
class FakeReport:
    text: str = "the report"

    def to_dict(self):
        return {"text": self.text}


@dataclass
class FakeEvent:
    step: int
    kind: str
    text: str
    epoch: int | None = None
    finished: bool = False
    steps: int = 2
    fraction: float = 0.5
    seconds_left: float | None = None


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """A runner that trains nothing and remembers how it was called."""
    fake = types.SimpleNamespace(calls=[], error=None, identical=True, ExpectationError=Failure)

    def compress(recipe, model, data, output, *, force, trust, progress, resume, checkpoint_every):
        fake.calls.append((recipe, model, output, force, trust, resume, checkpoint_every))
        for event in EVENTS:
            progress(event)
        result = types.SimpleNamespace(report=FakeReport(), directory=output)
        if fake.error is not None:
            raise fake.error if not isinstance(fake.error, str) else Failure(fake.error, result)
        return result

    def verify(directory, *, trust, progress):
        differences = () if fake.identical else ("conv_1/kernel: 3 of 144 values differ",)
        outcome = types.SimpleNamespace(identical=fake.identical, differences=differences)
        outcome.to_dict = lambda: {"identical": fake.identical, "differences": list(differences)}
        return outcome

    def plan(recipe, model, data, *, trust):
        target = types.SimpleNamespace(name="conv[1]/kernel", shape=(3, 3, 1, 16), size=144, sparsity=0.9, pruned=130)
        vars(target).update(minimum=None, maximum=None, override=None)
        skipped = types.SimpleNamespace(name="fc/bias", reason="a bias")
        step = types.SimpleNamespace(
            kind="prune",
            text="12 epochs",
            targets=(target,),
            skipped=(skipped,),
            pruning=((0, 0.0), (10, 0.9)),
            sections=(),
        )
        made = types.SimpleNamespace(
            name=recipe.name,
            model="digits_cnn",
            parameters=39402,
            steps_per_epoch=45,
            steps=(step,),
            notes=("a note",),
            metrics=(Metric("mae", "min"), Metric("own")),
            data=None,
        )
        made.data = None
        made.to_dict = lambda: {"name": recipe.name}
        return made

    fake.compress, fake.verify, fake.plan = compress, verify, plan
    report = types.SimpleNamespace(render_terminal=lambda report, console: console.print(report.text))
    for package, name, module in (
        (prunekit.recipe.run, "runner", fake),
        (prunekit.delivery.reports, "terminal_report", report),
    ):
        monkeypatch.setattr(package, name, module, raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", module)
    return fake


EVENTS = [
    FakeEvent(1, "prune", "starting", fraction=0.0),
    FakeEvent(1, "prune", "epoch 1/2", fraction=0.2),
    FakeEvent(1, "prune", "epoch 1/2", fraction=0.4),
    FakeEvent(1, "prune", "epoch 1/2, accuracy 0.9", epoch=1),
    FakeEvent(1, "prune", "epoch 2/2, accuracy 0.95", epoch=2, fraction=1.0),
    FakeEvent(1, "prune", "accuracy 0.95", fraction=1.0),
    FakeEvent(1, "prune", "done", fraction=1.0, finished=True),
]


@pytest.mark.every_backend
class TestWithoutTensorFlow:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["--version"],
            ["check", "digits"],
            ["check", "digits", "--json"],
            ["check", "nothing"],
            ["recipes"],
            ["recipes", "digits"],
            ["compress", "--help"],
            ["compress", "one-shot"],
            ["doctor", "--help"],
        ],
        ids=" ".join,
    )
    def test_no_heavy_module_is_imported(self, arguments):
        code = (
            f"import sys; from prunekit.cli import run; run({arguments!r})\n"
            f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
        assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"prunekit {prunekit.__version__}\n", "")


@pytest.mark.parametrize("name", ["compress", "check", "inspect", "report", "verify", "recipes", "doctor"])
def test_every_command_has_help(run, name):
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert "--json" in out
    assert name in run("--help")[1]


def test_no_command_shows_the_help_and_is_a_mistake(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], ["frob"]),
        (["--frob"], ["--frob"]),
        (["check"], ["Missing argument 'RECIPE'. See prunekit check --help."]),
        (["check", "digts"], ["digts: no such file", "Did you mean 'digits'"]),
        (["check", "."], ["a folder, not a recipe"]),
        (["check", "bad.yaml"], ["bad.yaml:2:1: unknown key 'step'. Did you mean 'steps'"]),
        (["check", "digits", "--set", "final"], ["expected name=value. Received: 'final'"]),
        (["check", "digits", "--set", "=1"], ["expected name=value"]),
        (["check", "digits", "--set", "finl=1"], ["digits.yaml:", "'finl' is set, but not declared", "mean 'final'"]),
        (["check", "digits", "--set", "final=90"], ["Write 0.9 for 90 %", "The value of $final"]),
        (["check", "digits", "--set", "final=0.1", "--set", "final=0.2"], ["'final' is set twice"]),
        (["check", "digits", "--set", "final=.inf"], ["final: expected a finite number"]),
        (["check", "digits", "--model", "x.keras"], ["--model and --trust need --plan"]),
        (["compress", "one-shot"], ["names no model. Pass --model FILE"]),
        (["compress", "one-shot", "--dry-run"], ["names no model"]),
        (["check", "one-shot", "--plan"], ["names no model"]),
        (["inspect", "no.keras"], ["no.keras: no such file"]),
        (["inspect", "line\nbreak.keras"], ["line break.keras: no such file"]),
        (["report", "."], ["not a run directory"]),
        (["verify", "nowhere"], ["nowhere: no such directory"]),
        (["compress", "digits", "--checkpoint-every", "x"], ["'x' is not a valid whole number"]),
        (["recipes", "digts"], ["Did you mean 'digits'"]),
        (["recipes", "-o", "x"], ["to copy a recipe, name it"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(run, tmp_path, arguments, words):
    (tmp_path / "bad.yaml").write_text("version: 1\nstep: []\n")
    assert_mistake(run(*arguments), *words)


def test_a_reader_that_closes_its_pipe_is_no_failure_of_an_expectation():
    command = [sys.executable, "-m", "prunekit", "recipes", "digits"]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    done.stdout.close()
    assert (done.stderr.read(), done.wait(timeout=60)) == (b"", 141)
    done.stderr.close()


def test_commands_that_need_a_finished_run_name_the_unfinished_one(run, tmp_path):
    (tmp_path / "mine.unfinished").mkdir()
    (tmp_path / "mine.unfinished" / "checkpoint-000001").touch()
    for command in ("verify", "report"):
        assert_mistake(run(command, "mine"), "mine: no", "mine.unfinished: continue with --resume")


def test_the_package_is_the_command_line_too():
    command = [sys.executable, "-m", "prunekit", "verify", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert_mistake((done.returncode, done.stdout, done.stderr), "nowhere: no such directory")


class TestCheck:
    def test_a_right_recipe_is_summed_up(self, run):
        code, out, err = run("check", "digits", "--set", "final=0.8")
        assert (code, err) == (0, "")
        assert out.startswith(
            "OK: digits, 8 steps (train, shrink, finetune, prune, finetune, export, quantize, expect)\n"
        )
        assert "4. prune: 12 epochs, polynomial_decay to 0.8" in out

    def test_json_holds_every_default(self, run):
        code, out, _ = run("check", "digits", "--json")
        answer = json.loads(out)
        assert (code, answer["ok"]) == (0, True)
        assert answer["recipe"]["steps"][3]["prune"]["schedule"]["power"] == 3

    def test_json_says_where_the_mistake_is(self, run, tmp_path):
        (tmp_path / "bad.yaml").write_text("version: 1\nsteps:\n  - trian: {epochs: 1}\n")
        code, out, err = run("check", "bad.yaml", "--json")
        answer = json.loads(out)
        assert (code, answer["ok"], answer["error"]["line"], answer["error"]["column"]) == (2, False, 3, 5)
        assert err.startswith("error: bad.yaml:3:5: ")

    def test_a_plan_shows_every_target_and_update(self, run, runner):
        code, out, err = run("check", "digits", "--plan")
        assert (code, err) == (0, "")
        for part in (
            "39,402 parameters",
            "conv[1]/kernel",
            "3 x 3 x 1 x 16",
            "130",
            "0 (0), 10 (0.9)",
            "fc/bias",
            "a note",
            "measures: mae (lower is better), the main metric, own (direction not known)",
        ):
            assert part in out

    def test_a_dry_run_is_a_plan_and_runs_nothing(self, run, runner):
        code, out, _ = run("compress", "digits", "--dry-run")
        assert code == 0 and "conv[1]/kernel" in out
        assert runner.calls == []

    def test_a_plan_as_json(self, run, runner):
        assert json.loads(run("check", "digits", "--plan", "--json")[1]) == {"name": "digits"}


class TestCompress:
    def test_everything_reaches_the_runner(self, run, runner, tmp_path):
        (tmp_path / "once.yaml").write_text(ONE_SHOT)
        code, out, err = run(
            "compress",
            "once.yaml",
            "-o",
            "here",
            "--model",
            "m.keras",
            "--force",
            "--trust",
            "--resume",
            "--checkpoint-every",
            "3",
        )
        assert code == 0
        (recipe, *others) = runner.calls[0]
        assert recipe.name == "once"
        assert others == ["m.keras", "here", True, True, True, 3]
        assert "the report" in out and "here/report.html" in out

    def test_without_output_the_run_is_under_runs(self, run, runner):
        run("compress", "digits", "--set", "final=0.7")
        (recipe, *others) = runner.calls[0]
        assert others == [None, os.path.join("runs", "digits"), False, False, False, 1]
        assert recipe.steps[3].settings.final_sparsity == 0.7

    def test_in_a_pipe_progress_is_a_line_for_each_epoch(self, run, runner):
        _, out, err = run("compress", "digits")
        assert err.splitlines() == [
            "[1/2 prune] starting",
            "[1/2 prune] epoch 1/2, accuracy 0.9",
            "[1/2 prune] epoch 2/2, accuracy 0.95",
            "[1/2 prune] accuracy 0.95",
        ]
        assert "[1/2" not in out

    def test_the_time_left_is_shown_from_ten_seconds_on(self, capsys):
        with terminal.Display() as display:
            for epoch, left in enumerate([125.0, 9.0], start=1):
                display(FakeEvent(1, "prune", f"epoch {epoch}/3", epoch=epoch, seconds_left=left))
        assert capsys.readouterr().err.splitlines() == [
            "[1/2 prune] epoch 1/3, about 2 min 05 s left",
            "[1/2 prune] epoch 2/3",
        ]

    def test_on_a_terminal_progress_is_live(self, runner, monkeypatch, capsys):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with terminal.Display() as display:
            for event in EVENTS:
                display(event)
        assert "1/2 prune" in capsys.readouterr().err

    def test_a_failed_expectation_is_exit_code_1(self, run, runner):
        runner.error = "accuracy 0.912 is below the expected 0.96"
        code, out, err = run("compress", "digits")
        assert code == 1
        assert "the report" in out
        assert err.endswith("error: expectation not met: accuracy 0.912 is below the expected 0.96\n")

    def test_json_says_whether_expectations_are_met(self, run, runner):
        runner.error = "too large"
        code, out, _ = run("compress", "digits", "--json", "-o", "x")
        assert code == 1
        assert json.loads(out) == {"directory": "x", "met": False, "report": {"text": "the report"}}

    @pytest.mark.parametrize(
        "error",
        [
            RecipeError("x exists already; replace it with --force"),
            ValueError("expected\n  one thing.\nReceived: another"),
            TypeError("no"),
            FileNotFoundError(2, "No such file or directory", "data.npz"),
            PermissionError(13, "Permission denied", "runs"),
            ImportError("install prunekit[examples] for the digits"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_a_mistake_found_later_is_one_line_too(self, run, runner, error):
        runner.error = error
        code, out, err = run("compress", "digits")
        assert (code, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("error: ") and len(err.splitlines()) == 5

    def test_a_backend_that_is_not_installed_is_named_with_what_to_do(self, run, runner, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
        runner.error = ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        code, _, err = run("compress", "digits")
        assert code == 2 and err.splitlines()[-1] == (
            "error: This command needs the package tensorflow, which is not installed. Install it (pip install "
            "tensorflow), or, for all that other backends run (docs/backends.md), set KERAS_BACKEND=jax or torch."
        )

    def test_no_other_backend_is_advised_where_one_is_set(self, run, runner, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        runner.error = ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        code, _, err = run("compress", "digits")
        assert code == 2 and err.splitlines()[-1] == (
            "error: This command needs the package tensorflow, which is not installed. Install it (pip install "
            "tensorflow): the backend that is set cannot do this (docs/backends.md)."
        )

    @pytest.mark.parametrize("name", ["tensorflow.python.missing", "own_package"])
    def test_another_missing_module_is_named_as_python_does(self, run, runner, name):
        runner.error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        assert run("compress", "digits")[2].endswith(f"error: No module named {name!r}\n")

    def test_a_traceback_is_shown_where_asked_for(self, run, runner, monkeypatch):
        monkeypatch.setenv(terminal.TRACEBACK, "1")
        runner.error = ValueError("deep inside")
        with pytest.raises(ValueError, match="deep inside"):
            run("compress", "digits")

    def test_a_defect_is_not_hidden(self, run, runner):
        runner.error = RuntimeError("a defect")
        with pytest.raises(RuntimeError, match="a defect"):
            run("compress", "digits")

    def test_a_defect_has_an_exit_code_of_its_own(self, runner, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        runner.error = RuntimeError("a defect")
        with pytest.raises(SystemExit) as ended:
            cli.main(["compress", "digits"])
        assert ended.value.code == cli.DEFECT
        assert "Traceback" in capsys.readouterr().err

    def test_an_interruption_is_one_line(self, run, runner):
        runner.error = KeyboardInterrupt()
        code, _, err = run("compress", "digits")
        assert code == 130
        assert err.endswith("error: interrupted.\n")


class TestVerify:
    def test_a_reproduced_run(self, run, runner, tmp_path):
        assert run("verify", tmp_path) == (0, f"{tmp_path}: reproduced, bit for bit.\n", "")

    def test_a_run_that_differs_is_exit_code_1(self, run, runner, tmp_path):
        runner.identical = False
        code, out, _ = run("verify", tmp_path)
        assert code == 1
        assert "NOT reproduced" in out and "conv_1/kernel: 3 of 144" in out
        assert run("verify", tmp_path, "--json")[0] == 1


def test_the_shell_completes_commands_and_options():
    for words, expected in (("prunekit com", {"compare", "compress"}), ("prunekit check --pl", {"--plan"})):
        typed = {"_PRUNEKIT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [sys.executable, "-m", "prunekit"]
        done = subprocess.run(command, env={**ENVIRONMENT, **typed}, capture_output=True, text=True, timeout=60)
        assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected
