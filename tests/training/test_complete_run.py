"""A complete run that is started again with other settings of islands."""

from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.rundir.resume import ResumePoint, report_already_complete
from odc_mpi.training.settings import load


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({"by": 2}, "4", None),
        ({"by": "off", "mode": "outer"}, "2", None),
        ({"by": 2, "mode": "outer"}, "2", "islands.mode outer -> "),
        ({"by": 2, "mode": "outer"}, "4", "islands.by 2 -> 4"),
        ({"by": 2, "mode": "outer"}, "off", "islands.by 2 -> off"),
    ],
)
def test_settings_of_islands_matter_if_they_train_separately(before, now, changed):
    config = load(None, ["--model.path", "model", "--data.path", "data.h5", "--islands.by", now])
    manifest = SimpleNamespace(metadata={"config": asdict(config) | {"islands": before}}, step=1)
    resume_point = ResumePoint(SimpleNamespace(manifest=manifest, close=lambda: None), True, None)
    with pytest.raises(AllRanksUserError, match=changed) if changed else nullcontext():
        assert report_already_complete(resume_point, config, SimpleNamespace(rank=0)) == {"steps": 1}
