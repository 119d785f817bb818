"""What the import contract cannot see of the pure packages: calls that read the clock, and hidden imports.

The packages and the modules they must not import are those of the contract "pure" in `.importlinter`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
LOADED_LAZILY = "anabranch.protocol.messages."
"""The registry imports a message when its API is first used."""
HIDDEN_IMPORTS = frozenset({"import_module", "__import__"})
SUBMODULES = frozenset({"importlib.metadata"})
"""Forbidden parts of packages that are allowed otherwise: the contract names whole packages only."""


def _contract() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


def _pure_files() -> Iterator[Path]:
    for module in _contract()["importlinter:contract:pure"]["source_modules"].split():
        path = ROOT / "src" / module.replace(".", "/")
        yield from sorted(path.rglob("*.py")) if path.is_dir() else (path.with_suffix(".py"),)


def impurities(source: str) -> list[str]:
    """Return what a module's source does that a pure one must not, with line numbers."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(args=[ast.JoinedStr(values=[ast.Constant(value=str(prefix)), *_])]) if (
                prefix == LOADED_LAZILY
            ):
                continue
            case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCK_METHODS | HIDDEN_IMPORTS:
                found.append(f"{node.lineno}: {name}()")
            case ast.Call(func=ast.Name(id=name)) if name in HIDDEN_IMPORTS:
                found.append(f"{node.lineno}: {name}()")
            case ast.Import(names=names):
                found += [f"{node.lineno}: {alias.name}" for alias in names if alias.name in SUBMODULES]
            case ast.ImportFrom(module=module, names=names):
                full = {module or "", *(f"{module}.{alias.name}" for alias in names)}
                found += [f"{node.lineno}: {name}" for name in sorted(full & SUBMODULES)]
    return found


def test_the_contract_covers_the_layers_that_decide() -> None:
    covered = set(_contract()["importlinter:contract:pure"]["source_modules"].split())
    assert covered >= {
        *(f"anabranch.{layer}" for layer in ("base", "codec", "protocol", "records", "machines")),
        "anabranch.spark.plan",
    }
    assert len(list(_pure_files())) > 100


def test_no_pure_module_reads_the_clock_or_hides_an_import() -> None:
    found = {str(path.relative_to(ROOT)): impurities(path.read_text()) for path in _pure_files()}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from datetime import datetime\nx = datetime.now()",
        "import datetime\nx = datetime.datetime.utcnow()",
        "from datetime import date\nx = date.today()",
        "from importlib import import_module\nimport_module('time')",
        "import importlib\nimportlib.import_module('time')",
        "__import__('time')",
        "import importlib.metadata",
        "from importlib.metadata import entry_points",
        "def f():\n    from importlib import metadata",
    ],
)
def test_what_is_impure_is_found(source: str) -> None:
    assert impurities(source)
