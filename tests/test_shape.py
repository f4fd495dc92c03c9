"""The size budget of design.md, held."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "triolet"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = ("util", "utils", "manager", "managers", "helper", "helpers", "common", "misc")
#: The shared types of the wire are what "common" means there, and design.md names the file so.
NAMED_BY_DESIGN = {"wire/common.py"}


def long_functions(text):
    return [
        f"{node.name} at line {node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def name(path):
    return path.relative_to(SOURCE).as_posix()


def test_there_is_something_to_check():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{name(path)}: split by noun"
    assert not long_functions(text), f"{name(path)}: split by noun"


def test_a_long_function_is_found():
    body = "\n".join("    pass" for _ in range(MAX_FUNCTION_LINES))

    assert long_functions(f"async def f():\n{body}\n") == ["f at line 1"]
    assert long_functions(f"def f():\n{body.removesuffix('pass').rstrip()}\n") == []


def test_every_file_is_named_for_a_noun():
    vague = [
        name(path)
        for path in FILES
        if set(path.stem.strip("_").split("_")) & set(VAGUE_NAMES)
        and name(path) not in NAMED_BY_DESIGN
    ]

    assert vague == []


@pytest.mark.slow
def test_every_module_says_what_it_is():
    silent = [
        name(path)
        for path in FILES
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]

    assert silent == []


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}

    assert [name(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
