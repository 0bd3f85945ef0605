"""Shows a run to people and programs while it runs: console, files, metrics, trace, bottleneck. It steers nothing.

A metric is a number of an iteration, under a name `area/name`. `run_log.py` collects all of them, writes them to
`metrics.jsonl` and gives them to every sink (`sinks.py`). Where a new metric goes depends on what it measures:

* a sample: in `Sample.metrics`, which the policy fills; its mean over the samples is written
* a training step: in `trainer/metrics.py`, as `train/...`
* how the trainer uses its devices: in `trainer/metrics.py`, as `perf/...`
* an iteration's time or its evaluation: in `iteration_metrics` or `evaluation_metrics` of `run_log.py`
* staleness, and what publishing does beside the trainer: in `RunLog`, for asynchronous runs only
* a stage: in the stage's counters (`stages/stage.py`), read in `meters.py`, as `stage/<stage>/...`
* a replica: in `meters.py`, as `replica/<name>/...`
* traffic of a role: in `types.Traffic`, which backends count, as `traffic/<role>/...`
* money and kept scores: in `spending/run_spending.py`
* the event loop: in `meters.py`, as `loop/...`

Each needs a row in docs/metrics.md; a test compares the two. Figures are something else: the results of an evaluation
(`evaluation/metrics.py`).
"""
