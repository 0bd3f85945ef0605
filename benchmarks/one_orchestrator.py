"""Measures how much of one core the orchestrator needs for a large cluster, and so where one orchestrator ends.

    python benchmarks/one_orchestrator.py

`spot-async simulate` gives the cluster: 64 servers for the student and 16 for the teacher, each at the rates of
`simulated_rates.yaml`, and a trainer that keeps up. 8,192 prompts are in flight: one batch of a strict run, or two
batches of 4,096 with `max_staleness=1`, which keeps the servers at work. Policy, stages, pools, queue and admission are
a run's own. So the process's CPU seconds over the virtual seconds are its share of a core, but for requests on the
wire. What these cost is added (`--wire-ms` of a prompt), as `client.py` measures it.

The simulated servers take CPU too. A second run sends them the same kinds of requests with no program between, and what
that takes is taken off. One orchestrator ends where its share is a whole core: it is one thread.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import yaml
from report import show

from spot_async.base.processes.resources import tune_gc
from spot_async.base.tasks import gather
from spot_async.config import Config
from spot_async.config.loading import load_config
from spot_async.testing.services import SimulatedVerifier
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.simulate.lengths import Asked, Workload
from spot_async.tools.simulate.rates import ClusterRates, cluster_rates
from spot_async.tools.simulate.services import RatedStudent, RatedTeacher, prompts
from spot_async.tools.simulate.simulation import make_policy, observe
from spot_async.types import IntArray, Prompt, SamplingSettings, ScoreRequest

HERE = Path(__file__).parent
STUDENTS, TEACHERS, IN_FLIGHT = 64, 16, 8192
UNLIMITED = 1 << 20
PROBES, TOP_K = 8, 16  # of a prompt; of a position
WARM_UP, COUNTED = 1, 2  # iterations; of the first, for each of those that are under way
# One rollout, one score and one request for candidates of 0.122 ms each, and eight probes of 0.026 ms: "Client" in
# README.md, at 1,024 in flight.
WIRE_MS = 3 * 0.122 + 8 * 0.026


def cluster(batch_size: int, students: int, teachers: int) -> tuple[Config, ClusterRates]:
    """Return the configuration and the rates."""
    stages = [
        f"stages.{name}.concurrency={UNLIMITED}" for name in ("rollout", "score", "candidates", "probe", "verify")
    ]
    config = load_config(HERE / "simulated_workload.yaml", [f"training.batch_size={batch_size}", *stages])
    given = yaml.safe_load((HERE / "simulated_rates.yaml").read_text())
    given["student"]["replicas"], given["teacher"]["replicas"] = students, teachers
    given["trainer"] = {"tokens_per_s": 9200 * students / 2, "fixed_s": 3}  # as many to a server as in the example
    return config, cluster_rates([given], config, make_policy(config).needs, knows_lengths=False)


@dataclass(frozen=True)
class Measured:
    """A run on the simulated cluster."""

    iteration_s: float  # virtual
    busy: dict[str, float]  # share of its rate that each role used
    whole_ms: float  # CPU of a prompt, the simulated servers' too
    servers_ms: float  # of these alone

    @property
    def program_ms(self) -> float:
        return self.whole_ms - self.servers_ms


def measure(staleness: int, arguments: argparse.Namespace) -> Measured:
    batch_size = arguments.in_flight // (staleness + 1)
    config, rates = cluster(batch_size, arguments.students, arguments.teachers)
    workload = Workload.of(rates.lengths, config.sampling.max_response_tokens)
    first = WARM_UP * (staleness + 1)
    last = first + COUNTED
    began_s = time.process_time()
    observed = run_on_virtual_time(observe(config, rates, workload, staleness, first, last))
    whole_s = (time.process_time() - began_s) / (batch_size * (last + staleness))
    busy = {}
    for role, worked in observed.worked.items():
        own = rates.of(role)
        most = (own.tokens_per_s or 0.0) * (own.replicas or 1) * observed.seconds / workload.grain
        busy[role] = worked / most
    began_s = time.process_time()
    run_on_virtual_time(servers_alone(rates, workload, arguments.in_flight))
    servers_s = (time.process_time() - began_s) / arguments.in_flight
    return Measured(observed.seconds / COUNTED, busy, 1e3 * whole_s, 1e3 * servers_s)


async def servers_alone(rates: ClusterRates, workload: Workload, in_flight: int) -> None:
    """Send SPOT's requests of so many prompts straight to the simulated servers."""
    asked = Asked()
    students = [RatedStudent("student", rates, workload, asked) for _ in range(rates.student.replicas or 1)]
    teachers = [RatedTeacher("teacher", rates, workload, asked) for _ in range(rates.teacher.replicas or 1)]
    verifier = SimulatedVerifier(latency_s=rates.verdict_s)

    async def one(number: int, prompt: Prompt) -> None:
        student, teacher = students[number % len(students)], teachers[number % len(teachers)]
        deadline, ids = float("inf"), prompt.token_ids

        async def sampled(seed: int, most: int) -> IntArray:
            reply = await student.generate(
                ids, SamplingSettings(max_tokens=most, seed=seed, stop_token_ids=()), deadline=deadline
            )
            await verifier.verify(prompt.problem, str(reply.token_ids), deadline=deadline)
            return reply.token_ids

        response = await sampled(number, workload.most)
        await teacher.score(ScoreRequest(ids, response, 1.0, deadline), top_k=TOP_K)
        positions = np.arange(len(response), dtype=np.int32)
        candidates = np.zeros((len(response), TOP_K), np.int32)
        await student.candidate_logprobs(
            ScoreRequest(ids, response, 1.0, deadline), positions, candidates, expected_version=None
        )
        await gather(sampled(number + probe, workload.most - 1) for probe in range(PROBES))

    await gather(one(number, prompt) for number, prompt in enumerate(islice(prompts(), in_flight)))


def main() -> None:
    parser = argparse.ArgumentParser(description="The orchestrator's share of a core on a large cluster.")
    parser.add_argument("--students", type=int, default=STUDENTS)
    parser.add_argument("--teachers", type=int, default=TEACHERS)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--wire-ms", type=float, default=WIRE_MS, help="CPU of a prompt's requests on the wire")
    arguments = parser.parse_args()
    tune_gc(prompts=arguments.in_flight)  # as a run does
    columns = []
    for staleness in (0, 1):
        found = measure(staleness, arguments)
        prompts_per_s = arguments.in_flight / (staleness + 1) / found.iteration_s
        whole_ms = found.program_ms + arguments.wire_ms
        share = whole_ms * prompts_per_s / 1e3
        columns.append(
            {
                "iteration, s": f"{found.iteration_s:.1f}",
                **{f"{role} busy": f"{busy:.0%}" for role, busy in found.busy.items()},
                "prompts/s": f"{prompts_per_s:.0f}",
                "CPU of a prompt and its simulation, ms": f"{found.whole_ms:.2f}",
                "the program, ms": f"{found.program_ms:.2f}",
                "the program and the wire, ms": f"{whole_ms:.2f}",
                "share of a core": f"{share:.0%}",
                "ends at prompts/s": f"{1e3 / whole_ms:.0f}",
                "ends at student servers": f"{arguments.students / share:.0f}",
            }
        )
    show(
        f"{arguments.students} students, {arguments.teachers} teachers, {arguments.in_flight:,} prompts in flight",
        ["max_staleness", "0", "1"],
        [[name, *(column[name] for column in columns)] for name in columns[0]],
        [f"load of the machine in the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"],
    )


if __name__ == "__main__":
    main()
