"""The script that proves outputs unchanged runs: a renamed setting would be seen when it is needed only."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/identical.py"


@pytest.mark.slow
def test_identical_records_and_compares(tmp_path):
    record = tmp_path / "before.json"
    command = [sys.executable, str(SCRIPT), str(record), "vit ToMe()"]
    assert "recorded" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "are what they were" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record.write_text(record.read_text().replace('"macs torch": "', '"macs torch": "1'))
    changed = subprocess.run(command, capture_output=True, text=True)
    assert changed.returncode == 1
    assert "macs torch" in changed.stdout
