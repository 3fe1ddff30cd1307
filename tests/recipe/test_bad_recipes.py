"""Recipes gone wrong, by the thousand: each is accepted, or refused in one located line; none runs code or hangs."""

import contextlib
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from processor_time import timed
from recipe_mutations import FULL, VALUES, WORDS, text_mutants, tree_mutants

from prunekit import cli
from prunekit.recipe.settings.fields import LONGEST_PATTERN, MOST_EXPRESSIONS, MOST_NEAREST, MOST_WIDE_RANGES, nearest
from prunekit.recipe.settings.schema import Recipe
from prunekit.recipe.text.loader import RecipeError, builtin_recipes, dump_recipe, load_recipe
from prunekit.recipe.text.yaml_reader import (
    DEEPEST,
    LARGEST_FILE,
    LONGEST_MESSAGE,
    LONGEST_NUMBER,
    MOST_ALIASES,
    MOST_VALUES,
    read_text,
)

LOCATED = re.compile(r"(?P<file>[^\n]+?):(?P<line>[1-9]\d*):(?P<column>[1-9]\d*): (?P<message>[^\n]+)")
LINE_ENDS = re.compile("\r\n|[\n\r\x85\u2028\u2029]".encode())
# The promise itself: no document takes longer. Of the processor's time, not of the clock, since another process that is
# busy is no reason to fail. The slowest below takes a third of it on one core of a server of 2023.
SLOWEST = 1.0
ANSWERS = ("accepted", "refused")
CODE = {"exec", "compile", "import", "pickle.find_class", "marshal.loads", "ctypes.dlopen", "subprocess.Popen"}
CODE |= {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "socket.connect"}
TEXTS = [FULL, *(path.read_text(encoding="utf-8") for path in builtin_recipes().values())]
TREES = [read_text(text.encode(), "x").data for text in TEXTS]
GENERATED = settings(
    derandomize=True, database=None, deadline=None, max_examples=100, suppress_health_check=list(HealthCheck)
)


class Watch:
    """What Python itself says that it does, while it is armed. A hook cannot be taken out again, so there is one."""

    armed: set[str] | None = None
    path = ""

    def __call__(self, event, arguments):
        if self.armed is None:
            return
        if event in CODE or (event == "open" and arguments[0] != self.path):
            self.armed.add(f"{event} {arguments[:2]!r}")


WATCH = Watch()
sys.addaudithook(WATCH)


@contextlib.contextmanager
def watched(path):
    """Inside, nothing is run, imported or opened but `path`, and it takes less than `SLOWEST`."""
    WATCH.path, WATCH.armed = str(path), set()
    try:
        with timed(SLOWEST):
            yield
        found = WATCH.armed
    finally:
        WATCH.armed = None
    assert not found


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Loads a document: "accepted" or "refused", or the test fails."""
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"
    load_recipe("digits")

    def judged(raw):
        path.write_bytes(raw)
        try:
            # Path.open says so with the path itself, as text.
            with watched(path):
                recipe = load_recipe(str(path))
        except RecipeError as error:
            assert_located(str(error), raw, path)
            return "refused"
        assert isinstance(recipe, Recipe)
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(path) == recipe
        return "accepted"

    return judged


def assert_located(text, raw, path):
    found = LOCATED.fullmatch(text)
    assert found is not None and found["file"] == str(path), text
    assert text.isprintable() and len(found["message"]) <= LONGEST_MESSAGE, text
    assert int(found["line"]) <= len(LINE_ENDS.findall(raw)) + 1, text
    assert "Traceback" not in text and not re.search(r"object at 0x|<class |errors\.pydantic", text), text


# ---- mutations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mutants", [(text_mutants, TEXTS), (tree_mutants, TREES)], ids=["texts", "trees"])
@pytest.mark.short(cases=3)
def test_200_mutants_are_accepted_or_refused(judge, mutants, seed):
    make, sources = mutants
    outcomes = Counter(judge(raw) for raw in make(sources, 200, seed))
    assert outcomes.total() == 200
    # Mutations that break everything, or nothing, would test little.
    assert outcomes["accepted"] >= 5 and outcomes["refused"] >= 120


def paths_of(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copied


@pytest.mark.parametrize("value", VALUES[::6], ids=lambda value: repr(value)[:30])
@pytest.mark.short(cases=5)
def test_a_wrong_value_anywhere(judge, value):
    for path in paths_of(TREES[0]):
        assert judge(json.dumps(replaced(TREES[0], path, value)).encode()) in ANSWERS


def test_a_missing_key_anywhere(judge):
    for path in paths_of(TREES[0]):
        if path:
            parent = TREES[0]
            for part in path[:-1]:
                parent = parent[part]
            if isinstance(parent, dict):
                without = {key: value for key, value in parent.items() if key != path[-1]}
                assert judge(json.dumps(replaced(TREES[0], path[:-1], without)).encode()) in ANSWERS


@pytest.mark.parametrize("word", WORDS[::3], ids=ascii)
def test_a_hostile_word_as_a_value_and_as_a_key(judge, word):
    for text in ("seed: {}", "{}: 7", "seed: 7 {}", "seed: [{}]", "seed: &x {}"):
        changed = FULL.replace("seed: 7", text.replace("{}", word), 1)
        assert judge(changed.encode("utf-8", "surrogatepass")) in ANSWERS


# ---- generated -------------------------------------------------------------------------------------------------------

names = st.sampled_from(
    "version name seed model data steps prune train epochs schedule type sparsity variables".split()
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(WORDS))
trees = st.recursive(
    plain,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(names | st.text(max_size=8), children, max_size=5)
    ),
    max_leaves=20,
)


@GENERATED
@given(st.binary(max_size=200))
def test_any_bytes(judge, raw):
    assert judge(raw) in ANSWERS
    assert judge(b"version: 1\n" + raw) in ANSWERS


@GENERATED
@given(st.lists(st.sampled_from([*WORDS, "version: 1", "\n", "  ", "a", "steps:", "prune:", "0.5"]), max_size=30))
def test_any_sequence_of_yaml_signs(judge, words):
    assert judge("".join(words).encode("utf-8", "surrogatepass")) in ANSWERS


@GENERATED
@given(trees, st.sampled_from(["variables", "model", "data", "compile", "steps", "name", "seed", "extra"]))
def test_any_tree_under_any_key(judge, tree, key):
    assert judge(json.dumps({**TREES[1], key: tree}).encode("utf-8", "surrogatepass")) in ANSWERS


@GENERATED
@given(trees, st.dictionaries(names, plain, max_size=3))
def test_any_mapping_given_in_python(tree, overrides):
    try:
        with timed(SLOWEST):
            recipe = load_recipe({"version": 1, "steps": tree}, overrides)
    except RecipeError as error:
        text = str(error)
        assert text.isprintable() and len(text) <= 2 * LONGEST_MESSAGE
    else:
        assert isinstance(recipe, Recipe)


# ---- the largest that the limits let through -------------------------------------------------------------------------

HEAD, TAIL = "version: 1\nmodel: {builtin: digits-cnn}\n", "steps: [prune: {sparsity: 0.5}]\n"
WIDE = "[!-\ufffd]"


def including(*patterns):
    """A recipe with these weight patterns."""
    quoted = ",".join(f"'{pattern}'" for pattern in patterns)
    return f"{HEAD}steps: [prune: {{sparsity: 0.5, include: [{quoted}]}}]\n"


def argument(text):
    """A recipe whose factory has this argument."""
    return f"version: 1\nmodel: {{factory: 'a:b', arguments: {{x: {text}}}}}\n{TAIL}"


def listed(form, count):
    """`form` with each number below `count` in the place of its #, separated by commas."""
    return ",".join(form.replace("#", str(i)) for i in range(count))


COSTLY = {
    "a warning of Python's own": including("re:[[a]"),
    "alternatives": including("re:" + "a|" * 30_000),
    "many expressions": including(*(f"re:a{i}[xyz]+" for i in range(3_000))),
    "nested repeats": including("re:" + "(?:a{0,99}){0,99}" * 90),
    "nested groups": including(*(f"re:{i}{'(' * 90}a{'|b)' * 90}" for i in range(21))),
    "sets in ignored case": including(*(f"re:(?i){i}{'[sk]' * 480}" for i in range(4))),
    "a wide range": including(f"re:(?i){WIDE}"),
    "wide ranges": including(*(f"re:(?i){i}{WIDE * 280}" for i in range(30))),
    "wide ranges, escaped": including(*(f"re:(?i){i}" + r"[!-\uffef]" * 190 for i in range(30))),
    "wide ranges of globs": including(WIDE * 280),
    "wide ranges in many": including(*(f"re:{i}(?i:{WIDE * 8})" for i in range(900))),
    "variables and a wrong one": f"version: 1\nvariables: {{{listed('v' * 20 + '#: 1', 1_900)}}}\n"
    f"model: {{builtin: ${'v' * 90}}}\n{TAIL}",
    "variables in a chain": HEAD
    + f"variables: {{v0: 1,{','.join(f'v{i}: $v{i - 1}' for i in range(1, 2_400))}}}\n{TAIL}",
    "a long variable, often": f"version: 1\nvariables: {{v: '{'y' * 50_000}'}}\n"
    f"model: {{factory: 'a:b', arguments: {{x: [{'$v,' * 4_000}]}}}}\n{TAIL}",
    "a long alias, often": argument(f"[&a '{'y ' * 30_000}',{'*a,' * MOST_ALIASES}]"),
    "long argument": argument("y" * 60_000),
    "words": argument('"' + "y " * 30_000 + '"'),
    "many words": argument("[" + '"a b c d e",' * 4_500 + "]"),
    "many lists": argument("[" + ("[" * 13 + "]" * 13 + ",") * 360 + "]"),
    "many arguments": argument("[" + "1," * 4_900 + "]"),
    "long argument's name": f"version: 1\nmodel: {{factory: 'a:b', arguments: {{{'k' * 900}: .inf}}}}\n{TAIL}",
    "long key": "version: 1\n" + "k" * 50_000 + "x: {a: 1}\n" + TAIL,
    "long variable": "version: 1\nvariables: {'" + "k" * 60_000 + "': 1}\n" + TAIL,
    "many steps": HEAD + "steps:\n" + "".join(f"- prune: {{sparsity: {0.5 + i / 4_000}}}\n" for i in range(150)),
    "many wrong steps": HEAD + "steps:\n" + "- trian: 1\n" * 1_600,
    "many wrong metrics": f"{HEAD}compile: {{metrics: [{listed('top_k_cat#', 4_200)}]}}\n{TAIL}",
    "many wrong formats": f"{HEAD}steps: [export: {{formats: [{listed('litertspa#', 4_200)}]}}]\n",
    "directives": "%a\n" * 20_000,
    "stairs": "".join(" " * (i % 30) + "a:\n" for i in range(3_500)),
    "an alias without end": "a: *" + "x" * 60_000,
    "a key over all lines": "[" + "a\n" * 30_000,
    "escapes": 'version: 1\nname: "' + "\\x41" * 15_000 + '"\n' + TAIL,
    "comments": HEAD + "#x\n" * 20_000 + TAIL,
    "path": "version: 1\nmodel: {file: '" + "../" * 20_000 + "x.keras'}\n" + TAIL,
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY)
def test_the_costliest_documents_are_judged_at_once(judge, text):
    assert len(text.encode()) <= LARGEST_FILE
    assert judge(text.encode()) in ANSWERS


@pytest.mark.parametrize(
    ("at_limit", "beyond", "message"),
    [
        (TAIL + "#" * (LARGEST_FILE - 48), None, "at most 64 KiB"),
        ("a: " + "[" * DEEPEST + "]" * DEEPEST, "a: " + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "at most 40 levels"),
        (
            "a: [" + "1," * (MOST_VALUES - 3) + "]",
            "a: [" + "1," * (MOST_VALUES - 2) + "]",
            "at most 5000 values",
        ),
        (
            "a: &a 1\nb: [" + "*a," * MOST_ALIASES + "]",
            "a: &a 1\nb: [" + "*a," * (MOST_ALIASES + 1) + "]",
            "at most 64 aliases",
        ),
        ("a: " + "9" * LONGEST_NUMBER, "a: " + "9" * (LONGEST_NUMBER + 1), "a number of at most 100 characters"),
    ],
    ids=["file", "levels", "values", "aliases", "number"],
)
def test_a_text_at_the_limit_and_one_more(at_limit, beyond, message):
    if beyond is None:
        at_limit = at_limit.ljust(LARGEST_FILE, "#")[:LARGEST_FILE]
        beyond = f"{at_limit}#"
    assert read_text(at_limit.encode(), "x").data is not None
    with pytest.raises(RecipeError, match=message):
        read_text(beyond.encode(), "x")


def test_a_pattern_at_the_limit_and_one_more():
    def recipe(length):
        return {"version": 1, "steps": [{"prune": {"sparsity": 0.5, "include": ["a" * length]}}]}

    assert load_recipe(recipe(LONGEST_PATTERN)).steps[0].settings.include == ("a" * LONGEST_PATTERN,)
    with pytest.raises(RecipeError, match="at most 2,000 characters. Received: 2,001"):
        load_recipe(recipe(LONGEST_PATTERN + 1))


def test_a_recipe_that_its_own_lock_could_not_hold_is_refused():
    steps = [{"prune": {"sparsity": 0.5}} for _ in range(400)]
    with pytest.raises(RecipeError, match="could not be read again: expected at most 5000 values"):
        load_recipe({"version": 1, "steps": steps})
    steps = [{"prune": {"sparsity": 0.5, "include": ["x" * 1_880]}} for _ in range(32)]
    with pytest.raises(RecipeError, match="could not be read again: expected a recipe of at most 64 KiB"):
        load_recipe({"version": 1, "steps": steps})


def test_expressions_at_the_limit_and_one_more():
    def steps(*patterns):
        return {"version": 1, "steps": [{"prune": {"sparsity": 0.5, "include": patterns}}]}

    quarter = "re:" + "a" * (MOST_EXPRESSIONS // 4 - 3)
    assert load_recipe(steps(*[quarter] * 4, "glob*")).steps
    with pytest.raises(
        RecipeError, match=r"steps\[0\].prune.include\[4\]: expected at most 8,000 characters of regular"
    ):
        load_recipe(steps(*[quarter] * 4, "re:a"))
    for ranges in ("[ä-ö]", r"re:[\u1000-\u2000]"):
        assert load_recipe(steps(*[ranges] * MOST_WIDE_RANGES, "a-z", "re:[a-z]-[0-9]")).steps
        with pytest.raises(RecipeError, match=r"include\[8\]: expected at most 8 '-' in a recipe's patterns with char"):
            load_recipe(steps(*[ranges] * MOST_WIDE_RANGES, ranges))


def test_aliases_count_as_the_values_they_refer_to():
    def document(count):
        aliases = "*a, " * count
        return f"version: 1\nmodel: {{factory: 'a:b', arguments: {{x: [&a '{'y' * 20_000}', {aliases}]}}}}\n{TAIL}"

    assert load_recipe(read_text(document(2).encode(), "x").data).model.arguments["x"] == ["y" * 20_000] * 3
    with pytest.raises(RecipeError, match="with aliases and variables written out: expected at most 65,536 characters"):
        load_recipe(read_text(document(3).encode(), "x").data)


@pytest.mark.parametrize("text", ["a\x07b", "\x85", "a\ud800", "\x7f"], ids=ascii)
def test_text_given_in_python_holds_no_more_than_a_file_may(text):
    with pytest.raises(RecipeError, match=f"character U.{ord(text.strip('ab')):04X} is not allowed in a recipe"):
        load_recipe({"version": 1, "description": text, "steps": [{"prune": {"sparsity": 0.5}}]})
    with pytest.raises(RecipeError, match=r"is not allowed in a recipe"):
        load_recipe({"version": 1, "variables": {"v": 1}, "description": "$v", "steps": []}, {"v": text})


def test_a_hint_lists_so_many_names_and_no_more():
    words = [f"word{i}" for i in range(MOST_NEAREST)]
    assert nearest("x", words).endswith(f"{words[-1]}.")
    assert nearest("x", [*words, "another"]).endswith(f"{words[-1]} and others.")


# ---- prunekit check --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_check_says_the_same_in_one_line(tmp_path, capsys, as_json):
    path = tmp_path / "recipe.yaml"
    costly = [] if as_json else [text.encode() for text in COSTLY.values()]
    for raw in [*text_mutants(TEXTS, 40, 77), *tree_mutants(TREES, 40, 78), *costly]:
        path.write_bytes(raw)
        # What --json prints of a recipe that is right takes time of its own.
        with timed(SLOWEST):
            code = cli.run(["check", str(path), *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        if code == 0:
            assert err == "" and (json.loads(out)["ok"] is True if as_json else out.startswith("OK: "))
            continue
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
        assert_located(err.removeprefix("error: ").rstrip("\n"), raw, path)
        if as_json:
            answer = json.loads(out)
            assert answer["ok"] is False and answer["error"]["line"] >= 1
        else:
            assert out == ""


def test_no_recipe_has_touched_the_file_that_hostile_ones_would():
    assert not Path("code-was-run").exists()
