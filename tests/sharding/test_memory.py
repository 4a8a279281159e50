"""The benchmark of memory per device: what is divided needs less of it and sends no more."""

import json
import os
import subprocess
import sys


def test_divided_sites_need_less_memory_and_send_no_more(tmp_path):
    rows = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.partition", "--length", "128", "--vocabulary", "1024", "--output", rows],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,  # attention of so short sequences needs no less
    )
    found = json.loads(rows.read_text())
    assert [row["kernel"] for row in found] == ["attention"] * 4 + ["cross_entropy"] * 4
    for row in found:
        assert row["replaced"] == 1, row
        assert row["kernel"] == "attention" or row["temporary_ratio"] < 0.8, row
        for kind, count in row["collectives"].items():
            assert count <= row["original_collectives"].get(kind, 0), row
