"""When a run that goes nowhere ends."""

import pytest

from odc_mpi.errors import TrainingError
from odc_mpi.observe.participant import Step
from odc_mpi.train.update import SkipLimit


def told(limit, *skipped):
    for number, one in enumerate(skipped, 7):
        limit.after_step(Step(number, None, {"skipped": one}))


def test_only_steps_in_a_row_count():
    limit = SkipLimit(3)
    told(limit, True, True, False, True, True)
    assert limit.state() == {"skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match=r"^step 7: .* in 3 steps in a row, which is run\.max_skipped_steps"):
        told(limit, True)


def test_the_count_goes_on_with_the_run():
    about = {"loader": {}, **SkipLimit(3).state(), "skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match="in 3 steps in a row"):
        told(SkipLimit(3, about), True)
    told(SkipLimit(3, about), False, True, True)
