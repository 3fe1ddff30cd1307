"""Takes the place of a sweep's point process: writes a run directory without training anything, or fails as told.

The variable `kind` selects the outcome: ok, unmet, mistake, crash, hang, silent, lying, or a duration such as 0.3s.
Run as a script with a task as JSON, as `sweep_process` is; nothing heavy is imported, so that it takes 0.1 s.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

SCRIPT = Path(__file__)
RECIPE = """
version: 1
variables: {final: 0.5, kind: ok, width: 1}
model: {builtin: digits-cnn}
data: {builtin: digits}
compile: {optimizer: adam, batch_size: $width}
steps: [prune: {sparsity: $final}, export: {formats: [keras, litert], name: $kind}]
"""


# ---- for the tests ---------------------------------------------------------------------------------------------------


def take_over(monkeypatch, folder):
    """Puts the stand-in in the place of point processes; returns the file of `RECIPE` in `folder`."""
    import run_reports

    from prunekit.recipe.sweep import sweep_process

    (folder / "template.json").write_text(json.dumps(run_reports.make().to_dict()))
    (folder / "small.yaml").write_text(RECIPE)
    monkeypatch.setenv("SWEEP_REPORT", str(folder / "template.json"))
    monkeypatch.setattr(sweep_process, "COMMAND", (sys.executable, str(SCRIPT)))
    return folder / "small.yaml"


def environment():
    """That of this process, with prunekit to import."""
    paths = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths}


def outcomes(report):
    """Outcome and reason by point."""
    return {found.name: (found.outcome, found.reason) for found in report.points}


def contents(folder):
    """Every file of a folder, with its bytes and the moment it was written."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def wait_for(happened, process=None):
    until = time.monotonic() + 120
    while not happened():
        assert process is None or process.poll() is None, "the sweep ended by itself"
        assert time.monotonic() < until
        time.sleep(0.05)


def prunekit(folder, *arguments):
    """Returns what the command line prints, run in its own process."""
    command = [sys.executable, "-m", "prunekit.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the process -----------------------------------------------------------------------------------------------------


def report_of(template, variables, kind):
    """The template with an accuracy that falls and a file that shrinks as `final` rises."""
    final, width = variables.get("final", 0.5), variables.get("width", 1)
    template["metrics"] = {"accuracy_before": 0.99, "accuracy_after": 0.99 - final**4 / 8 + 0.001 * width}
    for row in template["exports"]:
        if row["format"] == "litert":
            row["bytes"] = round(10_000 * (1 - final) * width) + 100
    template["expectations"] = [{"what": "accuracy", "bound": {"min": 1.0}, "measured": 0.9, "met": kind != "unmet"}]
    return template


def main():
    task = json.loads(sys.argv[1])
    text = Path(task["recipe"]).read_text()
    variables = yaml.safe_load(text).get("variables", {})
    kind = variables.get("kind", "ok")
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "mistake":
        print("chatter\nerror: no such weight\nmore chatter", file=sys.stderr)
        return 2
    if kind == "silent":
        return 3
    if kind == "lying":
        return 0
    if kind == "hang":
        Path(task["output"]).with_name("it-hangs").touch()
        while os.read(0, 1):
            pass
        Path(task["output"]).with_name("it-was-told-to-end").touch()
        return 130
    if kind.endswith("s"):
        time.sleep(float(kind[:-1]))
    output = Path(task["output"])
    partial = output.with_name(f".{output.name}.writing")
    (partial / "exports").mkdir(parents=True)
    template = json.loads(Path(os.environ["SWEEP_REPORT"]).read_text())
    (partial / "report.json").write_text(json.dumps(report_of(template, variables, kind)))
    (partial / "recipe.lock.yaml").write_text(text)
    (partial / "model.keras").write_text(f"{os.getpid()} {task['threads']} {task['trust']}")
    if task["force"] and output.exists():
        output.rename(output.with_name(f".{output.name}.old"))
    partial.rename(output)
    return 1 if kind == "unmet" else 0


if __name__ == "__main__":
    sys.exit(main())
