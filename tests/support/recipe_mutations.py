"""Recipes gone wrong: mutations of texts and of trees, each the same for the same seed."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

# Of every part of the schema, so that a mutation can reach it.
FULL = """\
version: 1
name: full
description: "Everything a recipe may say."
seed: 7
variables: {final: 0.9, epochs: 12, weights: "*logits*"}
model: {factory: "my.models:build", arguments: {width: 3, deep: {list: [1, 2.5, null, true, text]}}}
data:
  npz: data/arrays.npz
  arrays: {train_inputs: x, train_labels: y, test_inputs: xt, test_labels: yt}
  validation: 0.1
  test: 0.1
  preprocessing: [{Rescaling: {scale: 0.5}}, Normalization]
  limit: 100
  scale: 255.0
compile:
  optimizer: {name: adam, learning_rate: 1e-3, arguments: {beta_1: 0.8}}
  loss: sparse_categorical_crossentropy
  from_logits: true
  metrics: [accuracy, mae]
  batch_size: 64
steps:
  - train: {epochs: 10, learning_rate: 0.01}
  - prune:
      epochs: $epochs
      schedule: {type: polynomial_decay, initial_sparsity: 0.1, final_sparsity: $final, end: {epochs: 9}, power: 3}
      criterion: l2
      pattern: block:4x1:max
      allocation: global
      include: ["conv_*", "re:^fc_[0-9]+/kernel$$"]
      exclude: [$weights]
  - finetune: {epochs: 2}
  - prune: {sparsity: 0.95}
  - export: {formats: [keras, litert, litert-sparse], name: small}
  - expect:
      metrics: {accuracy: {min: 0.96}}
      drop: {accuracy: 0.01}
      sparsity: {min: 0.8, max: 0.99}
      bytes: {litert: {max: 100000, gzip_max: 50000}}
"""

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    -(10**99),
    0.0,
    -0.0,
    0.5,
    1.0,
    1e308,
    5e-324,
    90,
    "",
    " ",
    "x",
    "$",
    "$$",
    "$final",
    "$nothing",
    "a$b",
    "../../etc/passwd",
    "~root/x.keras",
    "os:system",
    "os.path:join",
    "re:(",
    "re:" + "(" * 500 + ")" * 500,
    "re:(a+)+$$",
    "[" * 50,
    "\u0130\u00df\ud7ff",
    "2:4",
    "0:0",
    "block:0x0",
    "block:999999x999999",
    "x" * 3000,
    [],
    [[]],
    {},
    {"": None},
    {"a": {"a": {"a": 1}}},
    {"type": "linear"},
    ["keras"] * 40,
    [None, 1, "x", {}],
]
WORDS = (
    "!!python/object/apply:os.system [touch code-was-run]",
    "!!python/object/new:subprocess.Popen [[touch, code-was-run]]",
    "!!python/name:os.system",
    "!!binary aGVsbG8=",
    "!!timestamp 2001-12-14",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!<tag:yaml.org,2002:python/object:os.system> x",
    "!local x",
    "&anchor",
    "*anchor",
    "&a [*a]",
    "<<: *anchor",
    "<<: {version: 1}",
    ".inf",
    "-.INF",
    ".nan",
    "2001-12-14t21:59:43.10-05:00",
    "2001-12-14",
    "12:30:45",
    "0x" + "f" * 60,
    "9" * 300,
    "1e999",
    "0b1010",
    "0o9",
    "1_000",
    "---",
    "...",
    "%YAML 1.1",
    "%TAG ! tag:x,2000:",
    "? ",
    "? [a, b] : c",
    "| ",
    ">-\n",
    "|9",
    "'",
    '"',
    '"\\x',
    '"\\ud800"',
    '"\\0"',
    '"\\U00110000"',
    "[",
    "]",
    "{",
    "}",
    "[[[[[[[[",
    "{a: {b: {c: ",
    ": ",
    "- ",
    ", ",
    "#",
    "@x",
    "`x`",
    "!",
    "&",
    "*",
    "\t",
    "\r",
    "\r\n",
    "\0",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "\u2028",
    "\ufeff",
    "\u202e",
    "\u200b",
    "\ufffe",
    "\U0001f600",
    "\ud800",
)


def text_mutants(texts: list[str], count: int, seed: int) -> Iterator[bytes]:
    """`count` documents, each one of `texts` with one to four changes of its characters, lines or bytes."""
    draw = random.Random(seed)
    for i in range(count):
        text = texts[i % len(texts)]
        for _ in range(draw.randint(1, 4)):
            text = draw.choice(_TEXT_CHANGES)(text, draw)
        raw = text.encode("utf-8", "surrogatepass")
        yield draw.choice(_BYTE_CHANGES)(raw, draw) if draw.random() < 0.3 else raw


def tree_mutants(trees: list[Any], count: int, seed: int) -> Iterator[bytes]:
    """`count` documents, each one of `trees` with one or two of its values, keys or branches changed."""
    draw = random.Random(seed)
    for i in range(count):
        tree = copy.deepcopy(trees[i % len(trees)])
        for _ in range(draw.randint(1, 2)):
            _change_tree(tree, draw)
        yield json.dumps(tree, indent=draw.choice([None, 1, 2]), ensure_ascii=draw.random() < 0.5).encode()


def _position(text: str, draw: random.Random) -> int:
    return draw.randrange(len(text) + 1)


def _insert(text: str, draw: random.Random) -> str:
    at = _position(text, draw)
    return text[:at] + draw.choice(WORDS) + text[at:]


def _insert_value(text: str, draw: random.Random) -> str:
    places = [i for i in range(len(text)) if text.startswith(": ", i)] or [0]
    at = draw.choice(places) + 2
    end = text.find("\n", at)
    return text[:at] + draw.choice(WORDS) + (text[at:] if draw.random() < 0.5 else text[end:])


def _delete(text: str, draw: random.Random) -> str:
    at = _position(text, draw)
    return text[:at] + text[at + draw.choice([1, 2, 5, 20, 200]) :]


def _cut(text: str, draw: random.Random) -> str:
    return text[: _position(text, draw)]


def _lines(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        lines.insert(i, lines[j])
    elif kind == 1:
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == 2:
        del lines[i]
    elif kind == 3:
        lines[i] = draw.choice([" ", "  ", "\t", "      ", " " * 300]) + lines[i]
    else:
        lines[i] = lines[i].lstrip()
    return "\n".join(lines)


def _letters(text: str, draw: random.Random) -> str:
    if not text:
        return "x"
    at = draw.randrange(len(text))
    other = draw.choice("abcxyz0189_-.:,[]{}'\"#&*!|>%@$ \n") if draw.random() < 0.7 else chr(draw.randrange(0xD800))
    return text[:at] + other + text[at + 1 :]


def _ends(text: str, draw: random.Random) -> str:
    return text.replace("\n", draw.choice(["\r\n", "\r", "\n\n", "\u2028", "\x85", "\n\t", " "]))


def _long(text: str, draw: random.Random) -> str:
    at = _position(text, draw)
    kind = draw.randrange(6)
    size = draw.choice([1_000, 10_000, 60_000])
    added = ("x" * size, " " * size, "\n" * size, "[" * size, "- " * size, "# " + "y" * size)[kind]
    return text[:at] + added + text[at:]


_TEXT_CHANGES = (_insert, _insert, _insert_value, _insert_value, _delete, _cut, _lines, _lines, _letters, _ends, _long)


def _flip(raw: bytes, draw: random.Random) -> bytes:
    changed = bytearray(raw or b"x")
    for _ in range(draw.randint(1, 5)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _encoded(raw: bytes, draw: random.Random) -> bytes:
    encoding = draw.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-7"])
    return raw.decode("utf-8", "replace").encode(encoding, "replace")


def _marked(raw: bytes, draw: random.Random) -> bytes:
    mark = draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf\xef\xbb\xbf", b"\0\0\xfe\xff"])
    return mark + raw


def _binary(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw) + 1)] + draw.randbytes(draw.choice([1, 10, 1000])) + raw


_BYTE_CHANGES = (_flip, _encoded, _marked, _binary)


def _branches(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of the tree."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        value = pending.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found.append((value, key))
            pending.append(item)
    return found


def _misspelt(key: str, draw: random.Random) -> str:
    at = draw.randrange(len(key) + 1)
    return draw.choice([key[:at] + key[at + 1 :], f"{key[:at]}x{key[at:]}", key.upper(), f"{key} ", key[::-1], ""])


def _change_tree(tree: Any, draw: random.Random) -> None:
    branches = _branches(tree)
    if not branches:
        return
    container, key = draw.choice(branches)
    kind = draw.randrange(6)
    if kind <= 2:
        container[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 3:
        del container[key]
    elif kind == 4 and isinstance(container, dict):
        container[_misspelt(key, draw)] = container[key] if draw.random() < 0.5 else container.pop(key)
    else:
        other, name = draw.choice(branches)
        container[key] = copy.deepcopy(other[name]) if isinstance(other, list) or name in other else None
