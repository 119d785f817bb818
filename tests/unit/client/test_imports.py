"""What the client loads before it is needed: each command of the command line would wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CLIENTS = "from anabranch.client import Admin, Consumer, Producer"
COMMAND = """
from anabranch.cli.entry import main
sys.argv = ["anabranch", "topic", "list", "-b", "localhost:1"]
try:
    main()
except SystemExit as end:
    assert end.code == 1
"""


@pytest.mark.parametrize("used", [CLIENTS, COMMAND], ids=["clients", "command"])
def test_what_handles_records_is_not_loaded_before_there_are_some(used: str) -> None:
    code = f"import sys\n{used}\nprint(sorted({{'numpy', 'pyarrow', 'numba'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr[-2000:]
