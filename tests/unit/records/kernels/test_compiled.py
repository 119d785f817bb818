"""Machine code belongs to the sources that were compiled, all of them: run by processes on a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch
from anabranch.records.kernels.compiled import PREFIX

COUNT_BATCHES = """
import struct
import numpy as np
from anabranch.records.kernels.plan import count_batches
data = np.frombuffer((struct.pack(">qi", 0, 70 - 12) + bytes(58)) * 2, np.uint8)
print(count_batches(data.ctypes.data, len(data)), bool(count_batches.stats.cache_hits))
"""
"""Two batches of 70 bytes; with lengths read from the wrong end, not one would be whole."""


class Copy:
    """The package in a directory of its own, run with a cache directory of its own."""

    def __init__(self, directory: Path) -> None:
        package = directory / "anabranch"
        self.records = package / "records"
        self.user_cache = directory / "cache"
        for part in ("base", "records"):
            shutil.copytree(
                Path(anabranch.__file__).parent / part, package / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(anabranch.__file__, package)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        self._environment |= {"PYTHONPATH": str(directory), "XDG_CACHE_HOME": str(self.user_cache)}

    def run(self, code: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    def edit(self, path: str, old: str, new: str) -> None:
        source = self.records / path
        text = source.read_text()
        assert text.count(old) == 1
        source.write_text(text.replace(old, new))

    def directories(self) -> list[Path]:
        """Those of machine code, wherever they are."""
        return sorted(self.records.parent.parent.glob(f"**/{PREFIX}*"))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_change_in_another_module_is_compiled_and_old_code_removed(copy: Copy) -> None:
    assert copy.run(COUNT_BATCHES) == "2 False"
    assert copy.run(COUNT_BATCHES) == "2 True"
    old_directories = copy.directories()
    copy.edit("kernels/memory.py", "\nbe32 = _reader(32, big=True,", "\nbe32 = _reader(32, big=False,")
    assert copy.run(COUNT_BATCHES) == "0 False"
    assert copy.run(COUNT_BATCHES) == "0 True"
    (directory,) = copy.directories()
    assert [directory] != old_directories


def test_a_package_that_cannot_be_written_has_its_code_in_the_users_cache(copy: Copy) -> None:
    (copy.records / "kernels" / "__pycache__").write_text("in the way, for root may write to any directory")
    assert copy.run(COUNT_BATCHES) == "2 False"
    assert copy.run(COUNT_BATCHES) == "2 True"
    (directory,) = copy.directories()
    assert directory.is_relative_to(copy.user_cache)


def test_a_package_in_an_archive_has_its_code_in_the_users_cache(copy: Copy, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "anabranch")
    shutil.rmtree(tmp_path / "anabranch")
    code = f"import sys; sys.path.insert(0, {archive!r}){COUNT_BATCHES}"
    assert copy.run(code) == "2 False"
    assert copy.run(code) == "2 True"


def test_a_version_that_still_runs_leaves_the_code_of_another_where_it_is(copy: Copy) -> None:
    change = f"""
from pathlib import Path
from anabranch.records.kernels import compiled, plan
ours = Path(plan.count_batches.stats.cache_path)
other = ours.with_name(compiled.PREFIX + "other")
ours.rename(other)
{COUNT_BATCHES}
print(ours.exists(), other.exists())
"""
    assert copy.run(change) == "2 False\nTrue True"
