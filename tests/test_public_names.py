import ast
from pathlib import Path

import pytest

import jkvq


def test_every_public_name_is_there_and_from_where_type_checkers_see_it():
    tree = ast.parse(Path(jkvq.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*seen, "__version__"} == set(jkvq.__all__)
    for name, home in seen.items():
        assert getattr(jkvq, name).__module__ == home


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jkvq' has no attribute 'lod'"):
        jkvq.lod  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
