"""scripts/sabotage, on a tree of three files that stands in for this one."""

import pytest
import sabotage
import yaml

FILES = {
    "adder.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + a\n",
    "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--short', action='store_true')\n",
    "test_adder.py": (
        "import os\nfrom adder import add, twice\n\n\n"
        "def test_sums():\n    assert add(2, 3) == 5\n\n\n"
        "def test_zero():\n    assert add(0, 0) == twice(0) == 0\n\n\n"
        "def test_of_nothing():\n    assert os.path.basename(os.getcwd()) == 'tree'\n"
    ),
    "docs/measured/faults.md": f"# Testing\n\n{sabotage.BEGIN}\nold\n{sabotage.END}\nThe end.\n",
}
CAUGHT = {
    "name": "sums are differences",
    "file": "adder.py",
    "old": "a + b",
    "new": "a - b",
    "tests": ["test_adder.py"],
}
MISSED = {**CAUGHT, "name": "twice is the square", "old": "a + a", "new": "a * a"}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the script on the stand-in with some faults: (exit code, output, errors, the page)."""
    # The plugins of pytest take most of the time to start it.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(text)

    def run_with(*faults, words=()):
        (tmp_path / "faults.yaml").write_text(yaml.safe_dump(list(faults)))
        code = sabotage.main([*words, "--root", str(root), "--faults", str(tmp_path / "faults.yaml"), "--imports"])
        captured = capsys.readouterr()
        assert {name: (root / name).read_text() for name in FILES if name.endswith(".py")} == {
            name: text for name, text in FILES.items() if name.endswith(".py")
        }, "the tree itself stays as it is"
        return code, captured.out, captured.err, (root / "docs" / "measured" / "faults.md").read_text()

    return run_with


def test_a_fault_that_a_test_catches_is_exit_code_0_and_names_the_test(run):
    code, out, _, page = run(CAUGHT)
    assert code == 0
    assert "sums are differences: caught by test_adder.py::test_sums" in out
    assert "1 of 1 faults caught." in out
    assert page == FILES["docs/measured/faults.md"]


def test_a_fault_that_no_test_catches_is_exit_code_1(run):
    code, out, _, _ = run(MISSED, CAUGHT)
    assert code == 1
    assert "twice is the square: NOT CAUGHT" in out
    assert "1 of 2 faults caught." in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "a * b"}, "expected the old text once in adder.py. Received: 0 times"),
        ({"old": "return"}, "expected the old text once in adder.py. Received: 2 times"),
        ({"file": "gone.py"}, "expected the old text once in gone.py. Received: 0 times"),
        ({"old": "a + b", "new": "a + b"}, "expected the old text once"),
        ({"tests": []}, "expected a name of its own, and tests"),
        ({"tests": ["test_gone.py"]}, "pytest ended with code 4"),
        ({"new": "a +"}, "pytest ended with code 2"),
    ],
    ids=["missing text", "text twice", "missing file", "no change", "no tests", "missing tests", "no program"],
)
def test_a_fault_that_cannot_be_tried_is_exit_code_2(run, change, message):
    code, out, err, _ = run(CAUGHT | change)
    assert code == 2
    assert message in err
    assert "caught by" not in out and "NOT CAUGHT" not in out


def test_tests_that_fail_without_a_fault_catch_nothing(run, tmp_path):
    (tmp_path / "root" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    code, _, err, _ = run(CAUGHT | {"tests": ["test_wrong.py"]})
    assert code == 2
    assert "test_wrong.py::test_wrong fails without any fault" in err


def test_words_choose_faults_and_a_list_runs_nothing(run):
    code, out, _, _ = run(MISSED, CAUGHT, words=["--list"])
    assert code == 0 and out == "twice is the square (adder.py)\nsums are differences (adder.py)\n"
    code, out, _, _ = run(MISSED, CAUGHT, words=["differences"])
    assert code == 0 and "1 of 1 faults caught." in out
    assert run(MISSED, words=["nothing"])[0] == 2


def test_the_table_of_the_page_is_written_and_keeps_rows_of_faults_that_were_not_run(run):
    page = run(CAUGHT, MISSED, words=["--write"])[3]
    caught = "| sums are differences | `adder.py` | `test_adder.py::test_sums` |"
    missed = "| twice is the square | `adder.py` | **not caught** |"
    assert page.split(sabotage.BEGIN)[1].split(sabotage.END)[0].splitlines()[1:] == [*sabotage.HEAD, caught, missed]
    assert page.startswith("# Testing\n") and page.endswith("The end.\n")
    again = run(MISSED, {**CAUGHT, "name": "new"}, words=["new", "--write"])[3]
    assert [line.split(" | ")[0] for line in again.splitlines() if "`adder.py`" in line] == [
        "| twice is the square",
        "| new",
    ]


def test_every_fault_of_this_tree_can_be_put_in():
    faults = sabotage.read_faults(sabotage.HERE / "faults.yaml")
    assert len(faults) >= 40
    for fault in faults:
        text = (sabotage.ROOT / fault.file).read_text()
        assert text.count(fault.old) == 1 and fault.old != fault.new, fault.name
        for test in fault.tests:
            file, *names = test.split("::")
            assert (sabotage.ROOT / file).is_file(), fault.name
            assert f"def {''.join(names[-1:])}" in (sabotage.ROOT / file).read_text(), fault.name
