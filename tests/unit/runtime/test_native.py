"""Machine code without Numba: it does what plain Python does, loads nothing else, and is not used when damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

import anabranch
from anabranch.base.errors import DecodeError
from anabranch.records.batch import BatchHeader, parse_header
from anabranch.records.examination import (
    INT64_MAX,
    INT64_MIN,
    REFUSED_RECORDS_REPORTED_MAX,
    Accepted,
    Flaw,
    examine,
)
from anabranch.records.timestamps import Search, search
from anabranch.runtime import native
from tests.properties import record_model as model
from tests.support.batches import make_keyed_batch, make_sound_batch


@pytest.fixture(scope="module")
def compiled() -> native.Native:
    if native.load() is None:
        native.build()
    found = native.load()
    assert found is not None
    return found


def test_bytes_of_every_kind_are_examined(compiled: native.Native) -> None:
    whole = make_sound_batch(3, b"x" * 100_000)
    for sound in (whole, make_sound_batch(3)):
        for records in (
            bytes(sound[61:]),
            bytearray(sound[61:]),
            memoryview(sound)[61:],
            memoryview(bytes(sound))[61:],
        ):
            assert compiled.examine(records, 3, 1_000, 1_000, Accepted()) is None
            for count, said in ((2, 1_000), (4, 1_000), (3, 999)):
                found = compiled.examine(records, count, 1_000, said, Accepted())
                assert found is not None
                assert found == examine(records, count, 1_000, said, Accepted())
    assert compiled.examine(b"", 1, 0, 0, Accepted()) == examine(b"", 1, 0, 0, Accepted())


def test_a_search_does_not_read_beyond_the_bytes(compiled: native.Native) -> None:
    header = parse_header(make_sound_batch())._replace(record_count=2**31 - 1)
    for records in (b"", b"\1", b"\0", b"\x80" * 50, b"\x02\0"):
        for timestamp in (None, 5):
            with pytest.raises(DecodeError):
                compiled.search(records, header, 0, timestamp)


def test_as_many_refused_records_as_are_reported_are_named(compiled: native.Native) -> None:
    many = REFUSED_RECORDS_REPORTED_MAX + 5
    records = make_keyed_batch([(None, b"v")] * many, timestamp=0)[61:]
    for accepted in (Accepted(keyed=True), Accepted(3, 5), Accepted(INT64_MIN, 1, keyed=True), Accepted(latest=-7)):
        found = compiled.examine(records, many, 0, many - 1, accepted)
        assert found == examine(records, many, 0, many - 1, accepted)
        assert found is not None
        assert len(found.refused) == REFUSED_RECORDS_REPORTED_MAX
        assert not found.sound
    assert found.counts[Flaw.UNTIMELY] == many


def _rows(chance: Random) -> tuple[int, list[model.Row]]:
    base = chance.choice([0, 5, 1 << 40])
    offsets = sorted(chance.sample(range(base, base + 400), chance.choice([1, 2, 30])))
    times = [chance.choice([0, 1, -1, 5, 1 << 41, INT64_MAX, INT64_MIN, chance.randrange(100)]) for _ in offsets]
    rows = [
        model.Row(at, time, chance.choice([None, b"k"]), b"v" * chance.randrange(100))
        for at, time in zip(offsets, times, strict=True)
    ]
    return base, rows


def _outcome(judge: Search, records: bytes, header: BatchHeader, least: int, timestamp: int | None) -> object:
    try:
        return judge(records, header, least, timestamp)
    except DecodeError:
        return DecodeError


@pytest.mark.parametrize("seed", range(100))
def test_a_search_finds_what_it_finds_in_plain_python(compiled: native.Native, seed: int) -> None:
    chance = Random(seed)
    base, rows = _rows(chance)
    batch = model.encode(model.Batch(base, tuple(rows)))
    header, records = parse_header(batch), bytearray(batch[61:])
    for _ in range(3):
        for timestamp in (None, 0, 3, 50, 1 << 41, INT64_MAX):
            for least in (0, -3, 7, 399, 400):
                wanted = _outcome(search, bytes(records), header, least, timestamp)
                found = _outcome(compiled.search, bytes(records), header, least, timestamp)
                assert found == wanted or wanted is DecodeError, "keys and values are passed over"
        header = header._replace(record_count=chance.choice([header.record_count, header.record_count + 1, 2**20]))
        records = bytearray(batch[61:])
        records[chance.randrange(len(records))] = chance.choice([1, 0, 0x80, 0xFF, 2])


class Copy:
    """The package in a directory of its own, with a cache of its own."""

    def __init__(self, directory: Path) -> None:
        self.package = directory / "anabranch"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(anabranch.__file__).parent, self.package, ignore=ignored)
        self.cache = directory / "cache"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        self._environment |= {"PYTHONPATH": str(directory), "XDG_CACHE_HOME": str(self.cache)}

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    def loaded(self) -> str:
        """Whether there is code, and what was loaded to run it."""
        code = "import sys; from anabranch.runtime import native; found = native.load(); "
        code += "print(found is not None, sorted({'numba', 'numpy', 'llvmlite'} & set(sys.modules)))"
        return self.run("-c", code)


def test_code_is_made_once_used_without_numba_and_not_used_when_damaged(tmp_path: Path) -> None:
    """In a package that cannot be written, which has its code in the user's cache."""
    copy = Copy(tmp_path)
    (copy.package / "records" / "kernels" / "__pycache__").write_text("in the way, for root may write to any directory")
    assert copy.loaded() == "False []"
    copy.run("-m", "anabranch.runtime.native")
    assert copy.loaded() == "True []"
    paths = sorted(tmp_path.glob("**/*.code"))
    assert [path.name for path in paths] == [native.file_name(name) for name in ("examine", "scatter", "search")]
    assert all(path.is_relative_to(copy.cache) for path in paths)
    for path in paths:
        content = bytearray(path.read_bytes())
        for damaged in (content[:-1], b"", bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            assert copy.loaded() == "False []"
        path.write_bytes(content)
    source = copy.package / "records" / "examination.py"
    source.write_text(source.read_text() + "# changed")
    assert copy.loaded() == "False []", "code of other sources"


def test_a_package_that_can_be_written_has_its_code_beside_its_kernels(compiled: native.Native) -> None:
    beside = Path(anabranch.__file__).parent / "records" / "kernels" / "__pycache__"
    assert all(list(beside.glob(f"*/{native.file_name(name)}")) for name in ("examine", "scatter", "search"))


def test_of_processes_that_build_at_once_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers that were started together each compiled the same code."""
    built: list[Path] = []

    def build(directory: Path) -> list[Path]:
        built.append(directory)
        time.sleep(0.2)
        return [native._keep(Path(directory, native.file_name(name)), b"code") for name in native.Native._fields]

    monkeypatch.setattr(native, "_directories", lambda: [str(tmp_path / "made")])
    monkeypatch.setattr(native, "_built", build)
    with ThreadPoolExecutor(4) as builders:
        found = [each.result() for each in [builders.submit(native.build) for _ in range(4)]]
    assert len(built) == 1 and found[1:] == found[:-1]
    found[0][1].write_bytes(b"damaged")
    assert native.build() == found[0] and len(built) == 2, "what is damaged is built again"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="others have fewer variants")
def test_code_is_made_for_a_processor_that_takes_checksums_and_does_not_multiply_without_carries(
    tmp_path: Path,
) -> None:
    """As virtual machines of the level x86-64-v2 have it."""
    code = """
import sys
from pathlib import Path
from llvmlite import binding
from anabranch.runtime import native
features = binding.get_host_cpu_features()
features |= {"pclmul": False, "vpclmulqdq": False}
binding.get_host_cpu_features = lambda: features
native._CPU_INFO = Path(sys.argv[1], "cpuinfo")
native._CPU_INFO.write_text("sse4_2 bmi1 bmi2 avx2")
print([path.name for path in native._built(Path(sys.argv[1]))])
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert "scatter-x86_64-steps.code" in done.stdout
