"""The decoder as an app has it: one short file, NumPy alone, and data that are not what they say."""

import ast
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from prunekit.delivery.packing import decoder
from prunekit.delivery.packing.decoder import KERAS, LITERT, Damaged, decode
from prunekit.delivery.packing.encoder import Piece, encode, number
from prunekit.delivery.packing.tensor_forms import best_form, text_form

FILE = Path(decoder.__file__)
pytestmark = pytest.mark.usefixtures("without_primes")
ARRAY = (np.random.default_rng(0).integers(-7, 8, (30, 20)) * (np.arange(20) % 3 == 0)).astype("|i1")


def packed():
    text = b"the graph of a model"
    pieces = [Piece(text_form(text)), Piece(best_form(ARRAY), ARRAY.shape)]
    return encode(pieces, text + ARRAY.tobytes(), LITERT).data, text + ARRAY.tobytes()


def lines_of_code(source):
    """Lines that are neither empty, comments, docstrings nor the primes, which are data."""
    tree = ast.parse(source)
    left_out = {i for i, line in enumerate(source.splitlines(), 1) if not line.strip() or line.strip()[0] == "#"}
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            left_out |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIMES":
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    return len(source.splitlines()) - len(left_out)


def test_it_has_at_most_200_lines_and_needs_numpy_alone():
    source = FILE.read_text()
    assert lines_of_code(source) <= 200
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


def test_a_copy_of_it_decodes_without_prunekit(tmp_path, monkeypatch):
    monkeypatch.undo()
    data, content = packed()
    (tmp_path / "app.py").write_text(
        FILE.read_text() + "\nimport sys\nassert 'prunekit' not in sys.modules\n"
        "sys.stdout.buffer.write(decode(open('net.pack', 'rb').read()))\n"
    )
    (tmp_path / "net.pack").write_bytes(data)
    found = subprocess.run([sys.executable, "-I", "app.py"], cwd=tmp_path, capture_output=True, check=True)
    assert found.stdout == content


def test_every_truncation_is_refused():
    data, _ = packed()
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:length])


def test_no_change_of_a_byte_gives_another_file():
    data, content = packed()
    rng = np.random.default_rng(1)
    refused = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= int(rng.integers(1, 256))
        try:
            assert decode(bytes(changed)) == content
        except Damaged:
            refused += 1
    # The last word of a lane has bits that no symbol needs.
    assert refused >= len(data) - 4


def test_noise_behind_the_mark_is_refused():
    rng = np.random.default_rng(2)
    for seed in range(60):
        with pytest.raises(Damaged):
            decode((KERAS if seed % 2 else LITERT) + rng.bytes(int(rng.integers(0, 200))))


def forged(rows, columns, form=0, dtype=1, lanes=b"\x01\x00"):
    """A file that declares one tensor of this size, with a table of one symbol: it takes no bits."""
    table = b"" if form > 4 else bytes([0, 1, 1, 1, 5])
    text = lanes + b"\x01" + bytes([form, dtype]) + number(rows) + number(columns) + table
    from prunekit.delivery.packing.coding import encode_text

    coded = encode_text(text)
    return LITERT + bytes(4) + number(0) + number(len(text)) + number(len(coded)) + number(0) + coded


@pytest.mark.parametrize(
    ("rows", "columns", "form"),
    [(1 << 20, 1 << 20, 0), (1 << 45, 0, 0), (0, 1 << 45, 0), (1 << 62, 1 << 62, 6), (1, (1 << 26) + 1, 7)],
)
def test_declared_sizes_are_refused_before_memory_is_taken(rows, columns, form):
    data = forged(rows, columns, form)
    decode_once = pytest.raises(Damaged, match="declares more bytes than it may hold")
    tracemalloc.start()
    with decode_once:
        decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_types_count_by_their_bytes():
    # 2**24 numbers of 8 bytes are more than may come of a short file; of 1 byte, they are not.
    with pytest.raises(Damaged, match="declares more bytes"):
        decode(forged(1 << 12, 1 << 12, dtype=10))


def test_the_largest_size_is_an_argument():
    data, content = packed()
    assert decode(data, largest=len(content)) == content
    with pytest.raises(Damaged, match="declares more bytes than it may hold"):
        decode(data, largest=500)


def test_more_lanes_than_words_are_refused():
    with pytest.raises(Damaged, match="tables are damaged"):
        decode(forged(4, 4, lanes=b"\x03\x00\x00\x00"))


def test_other_files_are_refused():
    with pytest.raises(Damaged, match="mark of a packed model"):
        decode(b"PK\x03\x04 something else")
