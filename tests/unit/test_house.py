"""The map of the code (docs/house.md) names what exists; files, functions and rooms are small; decisions are listed."""

from __future__ import annotations

import ast
import functools
import importlib
import re

import pytest

from tests.support.broker import ROOT

SOURCES = ROOT / "src" / "anabranch"
LAYERS = sorted(path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists())
_NAME = re.compile(rf"`((?:{'|'.join(LAYERS)})(?:\.\w+)*)`")
NAMES = sorted(set(_NAME.findall((ROOT / "docs" / "house.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_map_exists(name: str) -> None:
    parts = name.split(".")
    found = importlib.import_module("anabranch")
    for place, part in enumerate(parts, 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(["anabranch", *parts[:place]]))
        found = getattr(found, part)


def test_every_layer_is_on_the_map() -> None:
    assert set(LAYERS) <= set(NAMES)
    assert len(NAMES) > 50


# -- the shape of the house ------------------------------------------------------------------------------------------

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80
SERVER_ROOMS_MAX = 8
LONG_FILES = {"records/kernels/decode.py", "server/settings/table.py"}
"""A kernel, which is one loop over the bytes of a record, and the table of settings."""
KERNELS = "records/kernels/"
MODULES = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*.py")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each module as it is parsed: for two seconds, which no worker takes to find out which tests there are."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def long_functions(tree: ast.Module) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [each.name for each in functions if (each.end_lineno or 0) - each.lineno >= FUNCTION_LINES_MAX]


def test_no_file_is_long_but_a_kernel_and_the_table_of_settings() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name for name, length in lengths.items() if length > FILE_LINES_MAX} <= LONG_FILES


def test_no_function_is_long_but_kernels() -> None:
    long = {name: found for name, tree in trees().items() if (found := long_functions(tree))}
    assert {name for name in long if not name.startswith(KERNELS)} == set(), long


def test_the_server_has_few_rooms() -> None:
    inside = (SOURCES / "server").iterdir()
    rooms = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__"}
    assert len(rooms) <= SERVER_ROOMS_MAX, rooms


def test_every_module_says_what_it_is() -> None:
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_every_decision_is_in_the_index_under_a_number_of_its_own() -> None:
    adr = ROOT / "docs" / "adr"
    records = sorted(path.name for path in adr.glob("[0-9]*.md"))
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\) \| .+ \|$", (adr / "README.md").read_text(encoding="utf-8"), re.M)
    assert [name for _, name in listed] == records
    assert all(name.startswith(f"{number}-") for number, name in listed)
    assert len({number for number, _ in listed}) == len(records)
