"""What the report says held a run up."""

from __future__ import annotations

import pytest

from spot_async.inspection.bottleneck import RunTimes, StageUse, judge


def test_the_sentence_names_server_share_and_stages():
    times = RunTimes(
        wait_s=84.0,
        train_s=15.0,
        update_s=1.0,
        waited_for_s={"rollout": 21.0, "probe": 58.8, "score": 4.2},
        stages={"probe": StageUse(in_flight=200.0, queued=50.0, limit=256)},
        batch_size=64,
    )
    verdict = judge(times)
    assert verdict.sentence == (
        "Student bound: the trainer waited 84 % of the time, mostly for probe (70 %) and rollout (25 %)."
    )
    assert "stages.probe.concurrency" in verdict.advice[0]


PROBE = {"probe": 9.0, "verify": 1.0}


@pytest.mark.parametrize(
    ("times", "sentence", "advice"),
    [
        (RunTimes(0.0, 0.0, 0.0), "No times were recorded", ""),
        (RunTimes(4.0, 6.0, 0.1), "Trainer bound: optimisation took 59 %", "training.ranks"),
        (RunTimes(3.0, 3.0, 4.0), "Weight-update bound", "disk"),
        (RunTimes(9.0, 1.0, 0.0), "The trainer waited 90 % of the time; for what was not recorded.", ""),
        (RunTimes(9.0, 1.0, 0.0, {"score": 8.0, "rollout": 1.0}), "Teacher bound", "teacher.backend.score_tokens"),
        (RunTimes(9.0, 1.0, 0.0, {"verify": 8.0, "rollout": 1.0}), "Verifier bound", "verifier.workers"),
        (RunTimes(9.0, 1.0, 0.0, {"score": 4.0, "rollout": 5.0}), "Student and teacher bound", "max_response_tokens"),
        (RunTimes(9.0, 1.0, 0.0, {"rollout": 9.0}), "mostly for rollout (100 %).", "max_response_tokens"),
        (RunTimes(9.0, 1.0, 0.0, {"mystery": 9.0}), "for what was not recorded", ""),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(99.0, 3.0, 100)}, 64), "Student", "raise stages.probe"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(99.0, 0.0, 100, 64)}, 64), "Student", "64 slots were full"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(3.0, 0.0, 100)}, 64), "Student", "a few long ones"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(40.0, 0.0, 100)}, 64), "Student", "was not the reason"),
        (RunTimes(9.0, 1.0, 0.0, PROBE), "Student", "policy.probe_top_k"),
    ],
)
def test_every_bottleneck_has_its_words_and_its_keys(times, sentence, advice):
    verdict = judge(times)
    assert sentence in verdict.sentence
    assert advice in " ".join(verdict.advice)
