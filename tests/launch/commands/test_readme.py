"""The program in the README runs as it stands there."""

import re
import shutil

import pytest
from mpi_launch import ROOT, launch


@pytest.mark.quick
def test_the_program_trains(data, tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "runs" / "data").mkdir(parents=True)
    shutil.copy(data, tmp_path / "runs" / "data" / "stdlib.h5")
    done = launch(2, "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [int(step) for step, _ in lines] == list(range(10))
    assert float(lines[-1][1]) < float(lines[0][1])
