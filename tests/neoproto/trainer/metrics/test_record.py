"""The books of a run."""

from __future__ import annotations

from neoproto.trainer.metrics import record
from neoproto.trainer.metrics.phases import PhaseClock
from tests.neoproto.trainer.recording import Recorder


def test_metrics_that_a_loop_changes_afterwards_stay_as_they_were_booked() -> None:
    told = Recorder()
    recorder = record.Recorder(told, told, total_steps=1, steps_per_epoch=1, num_devices=1)
    metrics = {"val-core/words/acc/greedy": 0.5}
    recorder.validation(0, metrics, seconds=1.0)
    recorder.validation(1, metrics, seconds=1.0)
    step = {"critic/score/mean": 0.5, "perf/total_num_tokens": 8.0}
    recorder.step(1, step, PhaseClock(), samples=2)
    for given in (metrics, step):
        given.clear()
    result = recorder.result()
    assert result.first_validation == result.last_validation == {"val-core/words/acc/greedy": 0.5}
    assert told.reports[0].metrics["critic/score/mean"] == 0.5
