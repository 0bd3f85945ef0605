"""Opens the servers of a run, or of a command beside it: `open_services` is the one way to do so.

It makes a pool for each role, starts all of them together, keeps them alive, asks them what they offer, and gives the
student its first weights. It knows neither stages nor the loop: whoever opens services makes those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from spot_async.base import registry
from spot_async.base.processes.resources import CoreShares, available_cores, confined, share_cores
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import Loop, alongside, running, watched
from spot_async.base.waiting_room import Turns, in_turn
from spot_async.checks.capabilities import of_student
from spot_async.checks.device_shares import (
    check_room,
    device_gib,
    servers_on_devices,
    shares_gpu_time,
    starting_order,
)
from spot_async.checks.diagnosis import Diagnosis, capabilities, compare_students, diagnose
from spot_async.checks.plan import TrainPlan
from spot_async.config import ClusterConfig, Config, ModelConfig
from spot_async.errors import ConfigError
from spot_async.models.hub import local_path
from spot_async.protocols import Backend, Replicated, Sleeper, WeightSink
from spot_async.replicas.gpu_time_sharing import GpuTimeSharing
from spot_async.replicas.pool import PeopleListener, ReplicaPool
from spot_async.running.ray_places import placed
from spot_async.spending.account import Account
from spot_async.spending.run_spending import RunSpending
from spot_async.spending.teacher_cache import KeptScores
from spot_async.types import Capabilities, WeightSnapshot, WeightVersion


@dataclass(frozen=True)
class OpenServices:
    """Services that run and have answered, and what they were found to offer. Mappings are by role."""

    backends: Mapping[str, Any]  # each a `ReplicaPool`, unless one server was to be asked directly
    capabilities: Mapping[str, Capabilities]
    spending: RunSpending  # what is asked of them is charged to its accounts
    kept_scores: Mapping[str, KeptScores]  # where teachers' answers are kept
    time_sharing: GpuTimeSharing  # of those that are not awake together

    @property
    def student(self) -> Any:
        return self.backends["student"]

    def following(self, config: Config) -> dict[str, WeightSink]:
        """Return the servers of teachers that follow the student, by role."""
        return {role: self.backends[role] for role in config.following if role in self.backends}

    @property
    def sleepers(self) -> list[Sleeper]:
        """What sleeps while the trainer trains."""
        alone = [each for role, each in self.backends.items() if role not in self.time_sharing.pools]
        return [
            each for each in (*alone, self.time_sharing) if isinstance(each, Sleeper) and each.sleeps_while_training
        ]


@dataclass(frozen=True, kw_only=True)
class StartListener(PeopleListener):
    """Functions that are told how a start goes, and later what a pool has for people. By default they do nothing."""

    starting: Callable[[Mapping[str, Backend]], None] = lambda backends: None  # by role, before the first is entered
    step: Callable[[str], None] = lambda name: None  # what is done with the services next
    answered: Callable[[], None] = lambda: None  # a question of the checks is answered
    diagnosed: Callable[[Diagnosis], None] = lambda diagnosis: None  # before unsafe services are refused


@dataclass(frozen=True, kw_only=True)
class Companions:
    """What a caller has beside the servers that it opens. What is None is made for them."""

    # Entered and left together with the servers. What shares devices with them takes its turn.
    entered: Sequence[AbstractAsyncContextManager[Any]] = ()
    watches: Sequence[Loop] = ()  # run beside the servers'; the first that raises ends all
    spending: RunSpending | None = None
    cores: CoreShares | None = None
    turns: Turns | None = None
    listener: StartListener = StartListener()


@asynccontextmanager
async def open_services(
    served: Mapping[str, ModelConfig],
    directory: Path,
    *,
    run: tuple[Config, TrainPlan] | None = None,
    cluster: ClusterConfig | None = None,
    is_used: bool = True,
    directly: bool = False,
    beside: Companions = Companions(),
) -> AsyncIterator[OpenServices]:
    """Start or attach what is `served`, by role, and yield it once it has answered. Logs go under `directory`.

    * `run`: what the services are checked for. Without it they are only asked what they offer.
    * `cluster`: where servers with `launch.resources` are placed first; by default the run's.
    * `is_used`: unsafe services are refused (`ConfigError`), the teacher's scores are kept, and the student's servers
      get their first weights. False for a caller that only looks.
    * `directly`: only the first server of each role is opened, without a pool. If it ends, so does the `async with`.

    Errors of starting are raised as they are, and those of watches in an exception group.
    """
    listener = beside.listener
    spending = RunSpending(served) if beside.spending is None else beside.spending
    cores = core_shares(served) if beside.cores is None else beside.cores
    if cluster is None:
        cluster = ClusterConfig() if run is None else run[0].cluster
    if cluster.kind == "ray":
        listener.step("waiting for places on Ray")
    async with placed(served, cluster, directory) as there:
        turns = Turns(starting_order(there.served)) if beside.turns is None else beside.turns
        time_sharing = GpuTimeSharing()
        models = {role: _of_run(role, model, run) for role, model in there.served.items()}
        factories = {
            role: backend_factories(model, role, directory, spending.accounts.get(role), cores)
            for role, model in models.items()
        }
        servers: list[AbstractAsyncContextManager[Any]] = []
        if directly:
            if any(map(shares_gpu_time, models.values())):
                raise ConfigError("sleep_while_others_answer: servers are to be asked together here: set it to false")
            first = {role: next(iter(own.items())) for role, own in factories.items()}
            backends: dict[str, Any] = {role: make() for role, (_, make) in first.items()}
            servers = [in_turn(turns, name, backends[role]) for role, (name, _) in first.items()]
        else:
            backends = {
                role: _pool(role, model, factories[role], spending, listener, turns, time_sharing)
                for role, model in models.items()
            }
            servers = [*(pool for role, pool in backends.items() if role not in time_sharing.pools), time_sharing]
        replayed = spending.replayed_teachers
        backends |= replayed
        servers += replayed.values()
        entered = [*(spending.resources if is_used else ()), *servers, *beside.entered]
        with confined(cores):
            for warning in cores.warnings:
                listener.warn(warning)
            listener.starting(backends)
            check_room(servers_on_devices(there.served, device_gib(cluster, there.served)))
            async with (
                running(*entered),
                alongside(
                    *(each.watch for each in backends.values()), time_sharing.watch, *beside.watches, *there.watches
                ),
            ):
                found, diagnosis = await _ask(run, backends, listener)
                if run is not None:
                    shared = run[1].answering.items()
                    found = {**found, **{role: found[by] for role, by in shared if by in found and role not in found}}
                kept_scores: Mapping[str, KeptScores] = {}
                if is_used:
                    if diagnosis is not None:
                        diagnosis.raise_if_unsafe()
                    for warning in diagnosis.warnings if diagnosis is not None else ():
                        listener.warn(warning)
                    kept_scores = await spending.kept_scores(found)
                    found = await _give_first_weights(run, there.served, backends, found, listener)
                yield OpenServices(backends, found, spending, kept_scores, time_sharing)


def _of_run(role: str, model: ModelConfig, run: tuple[Config, TrainPlan] | None) -> ModelConfig:
    """Return the model with what its servers have to know of the run."""
    if run is None or not (role == "student" or role in run[0].following):
        return model
    lora = run[0].training.lora
    backend = model.backend.with_lora(lora) if role == "student" else model.backend.following(lora)
    return model.model_copy(update={"backend": backend})


def _pool(
    role: str,
    model: ModelConfig,
    factories: Mapping[str, MakeBackend],
    spending: RunSpending,
    listener: StartListener,
    turns: Turns,
    time_sharing: GpuTimeSharing,
) -> Any:
    """Make a pool of all servers of a role. Nothing is started."""
    account = spending.accounts.get(role)
    places = [each.place for each in model.backend.servers()]
    return ReplicaPool(
        role,
        factories,
        model.serving,
        are_ours=not any(place is not None and place.is_attached for place in places),
        rate_limit=account.rate_limit if account is not None and account.is_limited else None,
        people=listener,
        turns=turns,
        time_sharing=time_sharing if shares_gpu_time(model) else None,
    )


async def _ask(
    run: tuple[Config, TrainPlan] | None, backends: Mapping[str, Backend], listener: StartListener
) -> tuple[Mapping[str, Capabilities], Diagnosis | None]:
    """Return what the services offer and, for a run, the diagnosis of whether that is what it needs.

    If a question ends a server, its error is raised, since that says what is wrong. It is not started again.
    """
    if run is None:
        return {role: await capabilities(each) for role, each in backends.items()}, None
    listener.step("checking the servers")
    servers = [each for pool in backends.values() if isinstance(pool, Replicated) for each in pool.backends.values()]
    diagnosis = await watched(diagnose(*run, backends, listener.answered), [each.watch for each in servers])
    listener.diagnosed(diagnosis)
    return diagnosis.capabilities, diagnosis


async def _give_first_weights(
    run: tuple[Config, TrainPlan] | None,
    served: Mapping[str, ModelConfig],
    backends: Mapping[str, Any],
    found: Mapping[str, Capabilities],
    listener: StartListener,
) -> Mapping[str, Capabilities]:
    """Send the student's servers, and those of teachers that follow it, the weights that a run starts from.

    Return what the services offer then.
    """
    student = backends["student"]
    updated = ["student"] if run is None else ["student", *(role for role in run[0].following if role in served)]
    for role in updated:
        await send_initial_weights(served[role], backends[role], found[role], listener.step)
    if run is None:
        return found
    config, plan = run
    compared = await compare_students(config, plan, student, found["student"], listener.warn, listener.answered)
    return {**found, "student": compared, **of_student(config, compared)}


MakeBackend: TypeAlias = Callable[[], Backend]  # a new object each time, not entered


def backend_factories(
    model: ModelConfig,
    role: str,
    run_directory: Path,
    account: Account | None = None,
    cores: CoreShares | None = None,
) -> dict[str, MakeBackend]:
    """Return, by the name of each of the role's servers, what makes a backend for it.

    The name is `student`, or `student-1`, `student-2`, ... where there are several. Logs and errors use it too. All
    backends of the role, those made anew too, charge one `account`.
    """
    backend = registry.load("backends", model.backend.kind)
    make = partial(backend, role=role, model=local_path(model.model), run_directory=run_directory)
    own, start_s = {} if cores is None else cores.own, model.serving.start_timeout_s
    servers = {each.server_name(role): each for each in model.backend.servers()}
    return {name: partial(make, each.of_run(own.get(name), account, start_s)) for name, each in servers.items()}


def core_shares(models: Mapping[str, ModelConfig]) -> CoreShares:
    """Return the cores of this process, shared out to the servers that these roles' backends start."""
    wanted = {
        each.server_name(role): model.serving.own_cores
        for role, model in models.items()
        for each in model.backend.servers()
        if each.runs_here
    }
    return share_cores(available_cores(), wanted)


SENDING_WEIGHTS = "sending the student's weights to its server"  # the step's name


async def send_initial_weights(
    model: ModelConfig, student: WeightSink, found: Capabilities, announce: Callable[[str], None]
) -> None:
    """Send a model to a server that was running already and takes weights, as it may hold those of another run.

    A server that takes no weights can only be evaluated. It gets none, and is trusted to hold the right ones.
    """
    if found.version is not None or not found.weight_update:
        return
    announce(SENDING_WEIGHTS)
    deadline = asyncio.get_running_loop().time() + WEIGHT_UPDATE_TIMEOUT_S
    await student.update_weights(initial_weights(model), deadline=deadline)


def initial_weights(model: ModelConfig, lineage: int = 0) -> WeightSnapshot:
    """Return the model's directory as step 0. Its path is absolute, since servers may run in another directory."""
    return WeightSnapshot(directory=str(Path(local_path(model.model)).absolute()), version=WeightVersion(lineage, 0))
