"""Recipe files: what is read, and where each mistake stands."""

import pytest
import yaml
from processor_time import timed
from sample_recipe import LOCATED, TEXT

from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.text.yaml_reader import LARGEST_FILE, RecipeError as TextError, read_text, read_value


def changed(old, new):
    assert TEXT.count(old) >= 1
    return TEXT.replace(old, new, 1)


def test_a_recipe_is_read(load):
    recipe = load(TEXT)
    assert recipe.name == "sample"
    assert recipe.compile.optimizer.learning_rate == 0.001
    assert recipe.steps[1].settings.final_sparsity == 0.9
    assert recipe.steps[1].settings.epochs == 12
    assert recipe.variables == {"final": 0.9, "epochs": 12}


def test_overrides_replace_variables(load):
    recipe = load(TEXT, {"final": 0.5})
    assert recipe.steps[1].settings.final_sparsity == 0.5
    assert recipe.variables == {"final": 0.5, "epochs": 12}


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message"),
    [
        ("version: 1", "version: 2", 1, 10, "version: this prunekit reads recipes of version 1. Received: 2"),
        ("version: 1", "version: 1.0", 1, 10, r"version: this prunekit reads recipes of version 1. Received: 1\.0\."),
        ("version: 1\n", "", 1, 1, "'version' is missing"),
        ("seed: 7", "sede: 7", 3, 1, "unknown key 'sede'. Did you mean 'seed'"),
        ("seed: 7", "seed: 7.5", 3, 7, "seed: expected a whole number. Received: 7.5"),
        ("seed: 7", "seed: 7\nseed: 8", 4, 1, "key 'seed' is a duplicate; the first is in line 3"),
        ("seed: 7", "seed: &s 7\nname2: *s", 4, 1, "unknown key 'name2'. Did you mean 'name'"),
        ("seed: 7", "seed: !!int 7", 3, 7, "a recipe uses no YAML tags"),
        ("seed: 7", "seed: !!python/object/apply:os.system [x]", 3, 7, "a recipe uses no YAML tags"),
        ("seed: 7", "seed: .nan", 3, 7, "expected a finite number"),
        ("seed: 7", "seed: 1e999", 3, 7, "expected a finite number"),
        ("seed: 7", "seed: " + "9" * 5000, 3, 7, "expected a number of at most"),
        ("seed: 7", "seed: yes", 3, 7, "expected a whole number. Received: 'yes'"),
        ("seed: 7", "? [a]\n: 7", 3, 3, "expected a key that is a name"),
        ("seed: 7", "7: seed", 3, 1, "expected a key that is a name"),
        ("seed: 7", "<<: {seed: 7}", 3, 1, "no merge keys"),
        ("seed: 7", "\tseed: 7", 3, 1, "indent with spaces"),
        ("seed: 7", "seed: [7", 4, 10, "expected ',' or ']', but got"),
        ("seed: 7", "seed: *seven", 3, 7, "found undefined alias 'seven'"),
        ("seed: 7", 'name2: "\\ud800"', 3, 8, r"character U\+D800 is not allowed"),
        ("seed: 7", 'name2: "\\0"', 3, 8, r"character U\+0000 is not allowed"),
        ("seed: 7", 'name2: "\\UFFFFFFFF"', 3, 11, "an invalid escape sequence or number"),
        ("seed: 7", "seed: \x07", 3, 7, r"character U\+0007 is not allowed"),
        ("seed: 7", "---\nseed: 7", 3, 1, "found another document"),
        ("epochs: 10", "epoch: 10", 9, 13, r"steps\[0\]\.train: unknown key 'epoch'. Did you mean 'epochs'"),
        ("epochs: 10", "", 9, 12, r"steps\[0\]\.train: 'epochs' is missing"),
        ("epochs: $epochs", "epochs: twelve", 11, 15, "expected a whole number. Received: 'twelve'"),
        ("type: polynomial_decay", "type: polynomial", 13, 15, "Did you mean 'polynomial_decay'"),
        ("type: polynomial_decay", "power: 3", 13, 9, "schedule: 'type' is missing"),
        ("$final", "$fnal", 14, 25, r"unknown variable \$fnal. Did you mean 'final'"),
        ("$final", "0.$final", 14, 25, r"\$name replaces a whole value"),
        ("$final", "${final}", 14, 25, r"\$name replaces a whole value"),
        ("$final", "90", 14, 25, r"Received: 90\. Write 0\.9 for 90 %"),
        ("{epochs: 9}", "{epochs: 13}", 15, 14, "trains for 12 epochs, and this comes after 13 epochs"),
        ('"*logits*"', '"re:["', 16, 17, "is not a regular expression"),
        ("- litert", "- litret", 20, 11, "Did you mean 'litert'"),
        ("- litert", "- litert-int8", 20, 11, "needs data for its ranges: pk.quantize"),
        ("- litert", "- litert\n  -export:", 21, 3, "check its indentation, and the space after '-'"),
        ("- litert", "- keras", 20, 11, "format 'keras' is listed twice"),
        (
            "metrics: {accuracy: {min: 0.96}}",
            "bytes: {litert-float16: {max: 9}}",
            21,
            38,
            "'litert-float16' has no size to check",
        ),
        (
            "metrics: {accuracy: {min: 0.96}}",
            "bytes: {litre: {max: 9}}",
            21,
            22,
            "unknown value 'litre'. Did you mean 'litert'",
        ),
        ("variables:", "variabels:", 4, 1, "unknown key 'variabels'. Did you mean 'variables'"),
        ("{final: 0.9,", "{finl: 0.9,", 14, 25, r"unknown variable .final. Did you mean 'finl'.*declared under line 4"),
        ("{final: 0.9,", "{final: [0.9],", 4, 20, "variables.final: expected text, a number, true or false"),
        ("{final: 0.9,", "{final: $epochs,", 4, 20, "unknown variable .epochs. It is declared further down"),
        ("{final: 0.9, epochs: 12}", "[final]", 4, 12, "expected a mapping of names and values"),
        ("{final: 0.9,", "{fi-nal: 0.9,", 4, 13, "expected a name of letters, digits"),
    ],
)
def test_each_mistake_is_located(load, tmp_path, old, new, line, column, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load(changed(old, new))
    error = caught.value
    assert (error.source, error.line, error.column) == (str(tmp_path / "recipe.yaml"), line, column)
    assert str(error).startswith(f"{tmp_path / 'recipe.yaml'}:{line}:{column}: ")
    assert "\n" not in str(error)


def test_a_mistake_below_a_former_key_is_located(load):
    text = changed("- litert", "- litert\n  - quantize:\n      weights: 99")
    with (
        pytest.warns(FutureWarning, match="The key 'weights' of a recipe is now 'bits'"),
        pytest.raises(RecipeError, match=r":22:16: steps\[3\]\.quantize\.weights: expected bits, 2 to 8"),
    ):
        load(text)


def test_the_value_of_a_variable_is_named_with_the_place_of_its_use(load):
    with pytest.raises(RecipeError, match=r":14:25: .*Received: 90\. Write 0\.9 for 90 %\. \(The value of \$final\.\)"):
        load(TEXT, {"final": 90})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"finale": 0.5}, r":4:12: .*'finale' is set, but not declared.*Did you mean 'final'"),
        ({"x": 1}, "Valid here: final, epochs"),
        ({"final": [1]}, r":4:20: variables\.final: expected text, a number"),
        ({"final": "x"}, r":14:25: .*expected a number. Received: 'x'"),
    ],
)
def test_wrong_overrides_are_refused(load, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load(TEXT, overrides)


def test_setting_a_variable_that_nothing_uses_is_refused(load):
    with pytest.raises(RecipeError, match=r":4:13: .*variable 'final' is set, but nothing uses \$final"):
        load(changed("$final", "0.9"), {"final": 0.5})


def test_overrides_without_any_declared_variable_are_refused(load):
    with pytest.raises(RecipeError, match="not declared under 'variables'. Nothing is valid here"):
        load("version: 1\nsteps: [prune: {sparsity: 0.5}]\n", {"a": 1})


def test_a_variable_may_refer_to_an_earlier_one(load):
    text = changed("{final: 0.9,", "{goal: 0.7, final: $goal,")
    assert load(text).steps[1].settings.final_sparsity == 0.7
    assert load(text, {"goal": 0.6}).steps[1].settings.final_sparsity == 0.6


def test_a_variable_is_not_evaluated(load):
    with pytest.raises(RecipeError, match="expected a number. Received: '1 - 0.1'"):
        load(TEXT, {"final": "1 - 0.1"})


def test_dollar_signs_are_doubled_and_written_so(load):
    text = changed('"*logits*"', '"re:^fc$", "$$name"')
    recipe = load(text)
    assert recipe.steps[1].settings.exclude == ("re:^fc$", "$name")
    assert load(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    "name", ["1e-3", "0x10", "2:4", "yes", "null", "true", "1.0", "12", "-", "~x", "1_000", "0o17"]
)
def test_text_that_looks_like_something_else_stays_text(load, name):
    recipe = load(changed('"*logits*"', f'"{name}"'))
    assert recipe.steps[1].settings.exclude == (name,)
    assert load(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:4", "2:4"),
        ("1e-3", 0.001),
        ("no", "no"),
        ("off", "off"),
        ("true", True),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("0o17", 15),
        ("017", 17),
        ("0x1F", 31),
        ("+5", 5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ('"a\\nb"', "a\nb"),
        ("*conv*", "*conv*"),
        ("a: b", "a: b"),
        ("[1, 2]", "[1, 2]"),
        ("1_000", "1_000"),
        ("=", "="),
        ("²", "²"),
    ],
)
def test_values_are_those_of_yaml_1_2(text, value):
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["'a", '"\\x', "'a': b", ".inf", "9" * 200, "a\0b", "\udcff"])
def test_other_values_are_refused(text):
    with pytest.raises(RecipeError):
        read_value(text)


@pytest.mark.parametrize(
    ("raw", "line", "column", "message"),
    [
        (b"version: 1\nname: \xff\n", 2, 7, "expected UTF-8 text. Received: byte 0xff"),
        ("version: 1\nname: äö\n".encode("latin-1"), 2, 7, "byte 0xe4"),
        ("ä: ü\nö: ".encode() + b"\x80", 2, 4, "byte 0x80"),
        (TEXT.encode("utf-16"), 1, 1, "byte 0xff"),
        (b"\x00\x01", 1, 1, r"U\+0000"),
        (b"", 1, 1, "Received: nothing"),
        (b"# nothing\n", 1, 1, "Received: nothing"),
        (b"- version: 1\n", 1, 1, "Received: a list"),
        (b"version\n", 1, 1, "Received: 'version'"),
        (b"#" * (LARGEST_FILE + 1), 1, 1, "at most 64 KiB"),
        (b"%YAML 2.0\n---\na: 1\n", 1, 1, "incompatible YAML document"),
        (b"%YAML 1." + b"1" * 5000 + b"\n---\na: 1\n", 1, 9, "invalid escape sequence"),
    ],
)
def test_files_that_are_no_recipe_are_refused(load, raw, line, column, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load(raw)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_byte_order_mark_is_accepted(load):
    assert load(b"\xef\xbb\xbf" + TEXT.encode()).name == "sample"


BOMBS = {
    "billion laughs": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 6)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
    "alias inside itself": "version: 1\na: &a [*a]\n",
    "mapping inside itself": "version: 1\na: &a {b: *a}\n",
    "deep flow": "a: " + "[" * 100_000,
    "deep mapping": "a: " + "{a: " * 50_000,
    "deep block": "".join(" " * i + "a:\n" for i in range(600)),
    "deep list": "- " * 100_000,
    "many values": "a: [" + "1," * 60_000 + "]",
    "many aliases": "a: &a 1\nb: [" + "*a," * 50_000 + "]",
    "long key": "a" * 200_000 + ": 1",
    "long text": "a: '" + "x" * 250_000,
    "question marks": "? " * 100_000,
    "many anchors": "".join(f"a{i}: &a{i} 1\n" for i in range(15_000)),
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_at_once(load, text):
    with pytest.raises(RecipeError) as caught, timed(1.0):
        load(text)
    assert LOCATED.fullmatch(str(caught.value))


def test_a_few_aliases_are_fine(load):
    text = TEXT.replace("{epochs: 9}", "&end {epochs: 9}") + (
        "  - prune: {epochs: 12, schedule: {type: linear, final_sparsity: 0.95, end: *end}}\n"
    )
    recipe = load(text)
    assert recipe.steps[4].settings.schedule.end == recipe.steps[1].settings.schedule.end


def test_paths_are_relative_to_the_recipe_file(load, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    recipe = load(changed("{builtin: digits-cnn}", "{file: models/x.keras}"))
    assert recipe.model.file == str(tmp_path / "models" / "x.keras")


def test_the_file_gives_the_name_where_the_recipe_does_not(load):
    assert load(changed("name: sample\n", "")).name == "recipe"


def test_a_locked_recipe_is_the_same_recipe(load):
    recipe = load(TEXT)
    locked = dump_recipe(recipe)
    assert load(locked) == recipe
    assert dump_recipe(load(locked)) == locked
    assert yaml.safe_load(locked)["steps"][1]["prune"]["criterion"] == "auto"


def test_a_recipe_is_returned_as_it_is(load):
    recipe = load(TEXT)
    assert load_recipe(recipe) is recipe
    with pytest.raises(RecipeError, match="has its variables replaced already"):
        load_recipe(recipe, {"final": 0.5})


def test_a_mapping_is_read_like_a_file(load):
    assert load_recipe(read_text(TEXT.encode(), "x").data) == load(TEXT)


def test_a_mapping_inside_itself_is_refused():
    document = {"version": 1, "steps": []}
    document["steps"].append(document)
    with pytest.raises(RecipeError, match="at most 40 levels"):
        load_recipe(document)


def test_mistakes_in_a_mapping_are_named_by_their_path():
    document = read_text(changed("epochs: 10", "epoch: 10").encode(), "x").data
    with pytest.raises(RecipeError, match=r"^steps\[0\]\.train: unknown key 'epoch'") as caught:
        load_recipe(document)
    assert caught.value.line is None


@pytest.mark.parametrize("source", [3, None, [], b"x"])
def test_other_kinds_of_recipe_are_refused(source):
    with pytest.raises(TypeError, match="a path, a mapping or a Recipe"):
        load_recipe(source)


def test_there_is_one_recipe_error():
    assert TextError is RecipeError
    assert issubclass(RecipeError, ValueError)
