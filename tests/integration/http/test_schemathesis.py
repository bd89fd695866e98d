"""What /openapi.json says holds: schemathesis asks a started server whatever it can think of.

Statuses, content types, bodies, headers and access are as described, nothing is a server error, and
what does not fit a description is refused. The same requests every time.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lanes import examples
from tests.support.serve_process import OURS, served

pytestmark = pytest.mark.process

KEY = "a-key-of-this-test"
MANY = 200
CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.mark.long
def test_the_description_holds(tmp_path: Path) -> None:
    environment = {
        **OURS,
        "HOME": str(tmp_path),
        "SEMANTIC_CACHE": str(tmp_path / "cache"),
        "SEMANTIC_API_KEYS": KEY,
    }
    with served(tmp_path / "store", environment=environment) as process:
        done = subprocess.run(
            (
                *(str(Path(sys.executable).with_name("schemathesis")), "--no-color"),
                *("--config-file", str(CONFIG), "run", f"{process.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--max-examples", str(examples(1, thorough=20))),
            ),
            cwd=tmp_path,
            env={**environment, "TERM": "dumb"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) > MANY
