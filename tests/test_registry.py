"""Registries: rows by name, factories imported at first use."""

import pytest

from prunekit.registry import Registry, Row


def test_rows_keep_the_order_of_registration():
    rows = Registry("criterion", [Row("b", int), Row("a", float)])
    assert list(rows) == ["b", "a"] and rows["a"].load() is float and len(rows) == 2


def test_a_factory_given_as_a_place_is_imported_at_first_use():
    row = Row("later", "no_such_module:thing")
    assert Registry("criterion", [row])["later"] is row
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        row.load()
    assert Row("now", "prunekit.version:__version__").load()


def test_a_name_is_registered_once():
    rows = Registry("criterion", [Row("a", int)])
    assert rows.add(Row("a", int)) == rows["a"], "the same row again changes nothing"
    with pytest.raises(ValueError, match="criterion 'a' is already registered"):
        rows.add(Row("a", float))
    with pytest.raises(ValueError, match="needs a name"):
        rows.add(Row("", int))
    rows.remove("a")
    assert rows.add(Row("a", float)).load() is float
