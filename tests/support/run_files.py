"""Makes run directories as a run leaves them, and reads the text of pages about them."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from spot_async.run_directory.layout import RUN_FORMAT
from spot_async.run_directory.reading import RunFiles

CONFIG = """
policy: {kind: spot}
student: {model: nowhere, backend: {slots: 8}}
training: {iterations: 4, batch_size: 2, mini_batch_size: 1}
stages: {rollout: {concurrency: 8}, probe: {concurrency: 16}}
"""


def spot_sample(iteration=1, problem_id="p0", **changes):
    candidate = {"token_id": 5, "token": "five", "teacher": 0.5, "student": 0.07, "prior": 0.6, "value": 1.0,
                 "target": 0.8, "verdicts": ["correct"], "continuations": ["so \\boxed{1}"]}  # fmt: skip
    other = candidate | {"token_id": 6, "token": "six", "student": 0.2, "prior": 0.4, "value": 0.0, "target": 0.2,
                         "verdicts": ["wrong"], "continuations": ["so \\boxed{2}"]}  # fmt: skip
    return {
        "iteration": iteration,
        "problem_id": problem_id,
        "problem": "what?",
        "answer": "1",
        "tier": None,
        "response": "abc",
        "verdict": "correct",
        "finish_reason": "stop",
        "version": "0.0",
        "response_ids": [6, 7, 1],
        "behavior_logprobs": [-0.1, -2.0, -0.3],
        "teacher_logprobs": [-0.2, -0.5, -5.3],
        "teacher_entropy_nats": [0.1, 0.2, 0.3],
        "acquisition_score": [0.04, 0.01, None],
        "selected_positions": [0],
        "branches": [
            {"position": 0, "sampled": "six", "retained": True, "score_parts": {"entropy": 0.3},
             "candidates": [candidate, other]}
        ],
    } | changes  # fmt: skip


def metrics_row(iteration):
    return {
        "iteration": iteration,
        "rollout/accuracy": 0.25,
        "rollout/tokens": 12.0,
        "spot/selected": 1.0,
        "spot/retained": 1.0,
        "train/loss": 0.5,
        "train/grad_norm": 1.5,
        "time/iteration_s": 10.0,
        "time/wait_for_batch_s": 8.0,
        "time/train_s": 1.5,
        "time/update_weights_s": 0.5,
        "wait/probe_s": 7.0,
        "wait/rollout_s": 1.0,
        "stage/probe/requests": 8.0,
        "stage/probe/mean_in_flight": 5.0,
        "stage/probe/mean_queued": 1.0,
        "stage/rollout/requests": 2.0,
    }


def make_run(path, samples=(), rows=(), summary=None, policy="{kind: spot}"):
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"format": RUN_FORMAT, "command": "train"}))
    (path / "config.yaml").write_text(CONFIG.replace("{kind: spot}", policy))
    (path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return RunFiles(path)


class Tags(HTMLParser):
    """Collects the tags and attributes of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data
