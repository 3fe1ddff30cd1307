"""Deliberate faults, each put into a copy of the working tree, and whether the short suite catches it.

What scripts/sabotage starts. The faults are in faults.yaml beside this file.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Directories that are no part of the working tree.
LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "*.egg-info")
# What takes long to import, and is no part of the working tree. Not plugins of pytest, which rewrites them itself.
IMPORTS = ("keras", "h5py", "pydantic", "matplotlib.pyplot")
BEGIN, END = "<!-- sabotage: begin -->", "<!-- sabotage: end -->"
HEAD = ["| fault | in | caught by |", "|---|---|---|"]
_ROW = re.compile(r"^\| (?P<name>.+?) \| `")


class CannotRun(Exception):
    """Raised when a fault cannot be put in, or the tests cannot be run; the message says what to do."""


@dataclass(frozen=True)
class Fault:
    """One deliberate fault.

    Attributes:
        name: A sentence on the behaviour with the fault.
        file: The file, relative to the root.
        old: Text that occurs exactly once in the file.
        new: Text to put in its place.
        tests: Test files or test ids that are to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Puts the fault into the file below `root`; returns the text that the file had.

        Raises:
            CannotRun: The old text does not occur exactly once.
        """
        path = root / self.file
        former = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = former.count(self.old)
        if count != 1 or self.old == self.new:
            raise CannotRun(
                f"{self.name}: expected the old text once in {self.file}. Received: {count} times. Bring the fault in "
                "tests/support/faults.yaml up to date."
            )
        path.write_text(former.replace(self.old, self.new), encoding="utf-8")
        return former


@dataclass(frozen=True)
class Outcome:
    """What the tests of a fault came to.

    Attributes:
        fault: The fault.
        failed: Id of the first test that failed; None where none did.
        seconds: Time that the tests took.
        output: Last lines of pytest's output.
    """

    fault: Fault
    failed: str | None
    seconds: float
    output: str


def read_faults(path: Path) -> list[Fault]:
    """Returns the faults of a file.

    Raises:
        CannotRun: Two faults have the same name, or a fault has no tests.
    """
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    faults = [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    names = [fault.name for fault in faults]
    for fault in faults:
        if names.count(fault.name) > 1 or not fault.tests:
            raise CannotRun(f"{fault.name}: expected a name of its own, and tests.")
    return faults


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the working tree, without version control and environment; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="prunekit-sabotage-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        yield copy


class Tests:
    """Runs tests of the short suite in a copy, each time in a fork of one process that is ready for it.

    Args:
        copy: The copy.
        seconds: Longest time that one run may take.
        modules: What the process imports beforehand; nothing of the copy.
    """

    def __init__(self, copy: Path, seconds: float, modules: Sequence[str]):
        self.copy, self._seconds = copy, seconds
        command = [sys.executable, str(HERE / "fresh_pytest.py"), *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Tests":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def first_failure(self, tests: Sequence[str], *, runs: int = 1) -> tuple[str | None, str]:
        """Runs tests until one fails; returns its id, None where all pass, and the end of pytest's output.

        Args:
            tests: Files or ids.
            runs: How many times as long as usual it may take.

        Raises:
            CannotRun: No test was run, or pytest broke off for another reason than a failed test.
        """
        arguments = ["--short", "-x", "-q", "-p", "no:cacheprovider", *tests]
        request = {"folder": str(self.copy), "arguments": arguments, "seconds": runs * self._seconds}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        tail = "\n".join(answer["output"].splitlines()[-15:])
        if answer["code"] is None:
            raise CannotRun(f"the tests did not end within {runs * self._seconds:g} seconds: {' '.join(tests)}")
        if answer["code"] not in (0, 1):
            raise CannotRun(f"pytest ended with code {answer['code']}:\n{tail}")
        found = re.search(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", answer["output"], re.MULTILINE)
        if answer["code"] and found is None:
            raise CannotRun(f"pytest failed without naming a test:\n{tail}")
        return (found[1] if answer["code"] and found else None), tail


def try_fault(tests: Tests, fault: Fault) -> Outcome:
    """Runs the tests of a fault in a copy that has it; the copy is then as it was."""
    former, start = fault.apply(tests.copy), time.perf_counter()
    try:
        failed, output = tests.first_failure(fault.tests)
    except CannotRun as error:
        raise CannotRun(f"{fault.name}: {error}") from error
    finally:
        (tests.copy / fault.file).write_text(former, encoding="utf-8")
    return Outcome(fault, failed, time.perf_counter() - start, output)


# ---- the page --------------------------------------------------------------------------------------------------------


def updated(page: str, outcomes: Sequence[Outcome], names: Sequence[str]) -> str:
    """The page with new rows for the outcomes; rows of other faults stay, unless their fault is not in `names`."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {match["name"]: line for line in table.splitlines() if (match := _ROW.match(line))}
    for outcome in outcomes:
        rows[_cell(outcome.fault.name)] = _row(outcome)
    kept = [rows[_cell(name)] for name in names if _cell(name) in rows]
    return "\n".join([before + BEGIN, *HEAD, *kept, END]) + after


def _row(outcome: Outcome) -> str:
    test = "**not caught**" if outcome.failed is None else f"`{_cell(outcome.failed.partition('[')[0])}`"
    return f"| {_cell(outcome.fault.name)} | `{outcome.fault.file}` | {test} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the faults and prints what caught them; returns 1 where a fault was not caught, 2 where one cannot run."""
    parser = argparse.ArgumentParser(prog="scripts/sabotage", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="words of names: only faults whose name has one")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--write", action="store_true", help="write the table in docs/measured/faults.md")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--faults", type=Path, default=HERE / "faults.yaml", help=argparse.SUPPRESS)
    parser.add_argument("--imports", nargs="*", default=IMPORTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=300, help="longest time for the tests of a fault")
    options = parser.parse_args(arguments)
    try:
        faults = read_faults(options.faults)
        chosen = [one for one in faults if not options.names or any(name in one.name for name in options.names)]
        if not chosen:
            raise CannotRun(f"no fault has one of these words in its name: {' '.join(options.names)}")
        if options.list:
            print(*(f"{fault.name} ({fault.file})" for fault in chosen), sep="\n")
            return 0
        outcomes, broken = _tried(options.root, chosen, options)
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missed = [outcome for outcome in outcomes if outcome.failed is None]
    print(f"{len(outcomes) - len(missed)} of {len(chosen)} faults caught.")
    if options.write:
        page = options.root / "docs" / "measured" / "faults.md"
        text = updated(page.read_text(encoding="utf-8"), outcomes, [fault.name for fault in faults])
        page.write_text(text, encoding="utf-8")
    return 2 if broken else int(bool(missed))


def _tried(root: Path, faults: Sequence[Fault], options: argparse.Namespace) -> tuple[list[Outcome], int]:
    """Returns the outcomes, and how many faults could not be tried."""
    outcomes, broken = [], 0
    with copy_of(root) as copy, Tests(copy, options.seconds, options.imports) as tests:
        for fault in faults:
            (copy / fault.file).write_text(fault.apply(copy), encoding="utf-8")
        if not options.no_check:
            # Otherwise a test that fails anyway would seem to catch the fault.
            named = list(dict.fromkeys(test for fault in faults for test in fault.tests))
            failed, output = tests.first_failure(named, runs=len(named))
            if failed is not None:
                raise CannotRun(f"{failed} fails without any fault:\n{output}")
        for fault in faults:
            try:
                outcome = try_fault(tests, fault)
            except CannotRun as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                broken += 1
                continue
            word = f"caught by {outcome.failed}" if outcome.failed else f"NOT CAUGHT\n{outcome.output}"
            print(f"{fault.name}: {word} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    return outcomes, broken


if __name__ == "__main__":
    sys.exit(main())
