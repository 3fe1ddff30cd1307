"""Recipes changed at random: accepted, or refused in one line that says where."""

import random
import re

import pytest
from sample_recipe import LOCATED, TEXT

from prunekit.recipe.text.loader import RecipeError, builtin_recipes, dump_recipe

NASTY = [
    *("null", "true", "-1", "0", "1.5", "1e400", "[]", "{}", "[[]]", "{a: 1}", "'x'", '""', "$x", "$$", "$final", "~"),
    *("*a", "&a b", "!t x", "!!int x", "? x", "|", ">", "- -", "a: b", "'", '"', "[", "}", "%", "@", "`", "\t", "#"),
    *("\x00", "\x85", "\u2028", "\ufeff", "é", "𝒳", "\\", '"\\x"', '"\\ud800"', "---", "...", "2:4", "0x", "9" * 400),
    *("<<: {}", "=", ".inf", "1_0", "0o9", "re:(", "block:0x0", "9:9", "'a\x1bb'", "{? [a] : b}"),
]


def change_word(text, dice):
    """Replaces a word: by something nasty, by another word, by itself with two letters swapped."""
    words = list(re.finditer(r"[\w$*-]+", text)) or [re.match("", text)]
    word = dice.choice(words)
    k = dice.randrange(max(1, len(word[0]) - 1))
    swapped = word[0][:k] + word[0][k : k + 2][::-1] + word[0][k + 2 :]
    new = dice.choice([dice.choice(NASTY), dice.choice(words)[0], swapped])
    return text[: word.start()] + new + text[word.end() :]


def change_characters(text, dice):
    """Takes characters away, or puts something nasty in."""
    at = dice.randrange(len(text) + 1)
    return (
        text[:at] + text[at + dice.randint(1, 3) :]
        if dice.random() < 0.5
        else text[:at] + dice.choice(NASTY) + text[at:]
    )


def change_lines(text, dice):
    """Swaps, repeats, drops or indents lines."""
    lines = text.split("\n")
    i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
    swapped = list(lines)
    swapped[i], swapped[j] = lines[j], lines[i]
    indented = [*lines[:i], " " * dice.randint(0, 6) + lines[i].lstrip(), *lines[i + 1 :]]
    return "\n".join(
        dice.choice([swapped, [*lines[:i], lines[j], *lines[i:]], [*lines[:i], *lines[i + 1 :]], indented])
    )


def mutate(text, dice):
    """`text` after one to four changes of a kind that people, editors and attackers make."""
    for _ in range(dice.randint(1, 4)):
        text = dice.choice([change_word, change_characters, change_lines])(text, dice)
    return text


@pytest.mark.parametrize("seed", range(10))
def test_a_mutated_recipe_is_accepted_or_refused_with_one_located_line(load, seed):
    dice = random.Random(seed)
    documents = [TEXT, *(path.read_text() for path in builtin_recipes().values()), dump_recipe(load(TEXT))]
    accepted = refused = 0
    for _ in range(80):
        text = mutate(dice.choice(documents), dice)
        try:
            recipe = load(text)
        except RecipeError as error:
            refused += 1
            found = LOCATED.fullmatch(str(error))
            assert found, f"{error} for\n{text}"
            line, column = int(found[1]), int(found[2])
            # PyYAML counts some rarer characters as line breaks as well.
            lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
            assert 1 <= line <= len(lines) + 1 and 1 <= column, f"{error} for\n{text}"
            str(error).encode("utf-8")
        else:
            accepted += 1
            assert load(dump_recipe(recipe)) == recipe, text
    assert accepted > 0 and refused > 40


def test_mutated_bytes_are_accepted_or_refused_with_one_located_line(load):
    dice = random.Random(0)
    raw = TEXT.encode()
    for _ in range(200):
        changed_raw = bytearray(raw)
        for _ in range(dice.randint(1, 3)):
            changed_raw[dice.randrange(len(raw))] = dice.randrange(256)
        try:
            load(bytes(changed_raw))
        except RecipeError as error:
            assert LOCATED.fullmatch(str(error))
