"""Servers and a trainer on one GPU: they start in turn, with caches as they were planned, and never exceed it."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from pathlib import Path

import pytest
from ready_order import run_shuffled
from replica_incidents import ask
from shared_device import GIB, Device, Sglang, Trainer, Vllm

from spot_async.backends.sglang import SglangBackend
from spot_async.backends.sglang.process import sglang_command
from spot_async.backends.shared.launch import Doorway, Installed
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm import VllmBackend
from spot_async.backends.vllm.process import Uses, vllm_command
from spot_async.base.tasks import alongside, leaves, running
from spot_async.base.waiting_room import Turns, in_turn
from spot_async.checks.device_shares import TRAINER, servers_on_devices, shared_out, starting_order
from spot_async.config import ClusterConfig, ModelConfig, ServingConfig, TrainingConfig
from spot_async.errors import ProcessDiedError, SpotError
from spot_async.loop.publishing import SleepingServers
from spot_async.models.footprint import per_device, trainer_memory
from spot_async.models.model_size import read_size
from spot_async.replicas.gpu_time_sharing import GpuTimeSharing
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.testing.virtual_time import run_on_virtual_time

pytestmark = pytest.mark.usefixtures("quiet")

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
SHAPES = {"student": (28, 2048, 6144, 16, True), "teacher": (36, 4096, 12288, 32, False)}  # of 1.7B and 8B
FRACTIONS = {"student": 0.3, "teacher": 0.35}  # as configs/paper/lora.yaml
CARD_GIB = 79.2  # of 80 that are sold
KINDS = {
    "vllm": (VllmBackend, partial(vllm_command, uses=Uses(max_logprobs=65, takes_weights=True)), Vllm),
    "sglang": (SglangBackend, sglang_command, Sglang),
}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "tie_word_embeddings")
    for role, shape in SHAPES.items():
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(QWEN3 | dict(zip(names, shape, strict=True))))
    return {role: tmp_path / role for role in SHAPES}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr("spot_async.backends.vllm.process.installed", lambda *_: Installed("0.32.0", True, None))


class OneGpu:
    """A student's server that sleeps while the trainer trains, a teacher's that does not, and the trainer."""

    def __init__(self, kind: str, models: dict[str, Path], seed: int, *, is_planned: bool = True) -> None:
        self.device = Device(CARD_GIB)
        rng = random.Random(seed)
        backend, make_command, stand_in = KINDS[kind]
        served = {
            role: ModelConfig(
                model=str(directory),
                backend=backend.Settings(
                    kind=kind,
                    launch=LaunchSettings(python="python", devices="0", memory_fraction=FRACTIONS[role]),
                    sleep_while_training=role == "student",
                ),
            )
            for role, directory in models.items()
        }
        if is_planned:
            served = shared_out(served, ClusterConfig(device_gib=CARD_GIB))
        self.planned = {each.name: each for each in servers_on_devices(served, CARD_GIB)}
        self.turns = Turns(starting_order(served, 1) if is_planned else {})
        self.made: dict[str, list] = {role: [] for role in served}

        def factory(role):
            size = read_size(models[role])
            command = make_command(served[role].backend.launch, models[role], Doorway(8000, Path("/none"), "key"))
            weights_gib = 2 * size.parameters / GIB
            server = stand_in(self.device, command.argv, weights_gib, size.cache_bytes_per_token, rng)
            self.made[role].append(server)
            return server

        self.pools = {
            role: ReplicaPool(role, {role: partial(factory, role)}, ServingConfig(restarts=9), turns=self.turns)
            for role in served
        }
        rank = trainer_memory(
            read_size(models["student"]),
            TrainingConfig(
                iterations=1, batch_size=32, dtype="bfloat16", micro_batch_tokens=5_120, recompute_layers=True
            ),
            longest_tokens=5_120,
        )
        self.trainer = Trainer(self.device, rank.resting, rank.training, rng)

    def open(self):
        entered = [*self.pools.values(), in_turn(self.turns, TRAINER, self.trainer)]
        random.Random(len(self.planned)).shuffle(entered)
        return running(*entered)

    def check(self) -> None:
        for role, servers in self.made.items():
            assert servers[-1].cache_gib == pytest.approx(self.planned[role].cache_gib, abs=0.001)
        assert self.device.free_gib >= 0

    async def iteration(self) -> None:
        soon = asyncio.get_running_loop().time() + 600.0
        await self.pools["student"].sleep(deadline=soon)
        await self.trainer.train()
        await self.pools["student"].wake_weights(deadline=soon)
        await self.pools["student"].wake(deadline=soon)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_one_gpu_starts_whoever_is_ready_first_and_has_what_was_planned(kind, seed, models):
    async def scenario():
        gpu = OneGpu(kind, models, seed)
        async with gpu.open():
            gpu.check()
            await gpu.iteration()
            gpu.check()

    run_shuffled(scenario(), seed)


@pytest.mark.parametrize("victims", [["student"], ["teacher"], ["student", "teacher"]], ids="+".join)
@pytest.mark.parametrize("moment", ["sampling", "training", "at once after waking"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_started_again_has_the_same_cache(kind, moment, victims, models):
    async def scenario():
        gpu = OneGpu(kind, models, 7)

        def kill():
            for role in victims:
                gpu.made[role][-1].kill()

        async with gpu.open(), alongside(*(pool.watch for pool in gpu.pools.values())):
            if moment == "training":
                asyncio.get_running_loop().call_later(15.0, kill)
            await gpu.iteration()
            if moment != "training":
                await asyncio.sleep(0.0 if "once" in moment else 40.0)
                kill()
            await asyncio.sleep(300.0)
            assert {each.state for pool in gpu.pools.values() for each in pool.replicas} == {State.SERVING}
            assert all(len(gpu.made[role]) == 2 for role in victims)
            gpu.check()
            await gpu.iteration()
            gpu.check()

    run_on_virtual_time(scenario())


class TwoTeachersOnOneGpu:
    """Two teachers of 8B that share the time of a card, and sleep while the trainer of 1.7B trains on the same card."""

    def __init__(self, kind: str, models: dict[str, Path], rng: random.Random) -> None:
        self.device = Device(CARD_GIB)
        backend, make_command, stand_in = KINDS[kind]
        settings = backend.Settings(
            kind=kind,
            launch=LaunchSettings(python="python", devices="0", memory_fraction=0.55),
            sleep_while_training=True,
            sleep_while_others_answer=True,
        )
        teacher = ModelConfig(model=str(models["teacher"]), backend=settings)
        served = shared_out({f"teachers.{name}": teacher for name in ("math", "code")}, ClusterConfig(device_gib=79.2))
        self.servers = servers_on_devices(served, CARD_GIB)
        turns, self.time_sharing = Turns(starting_order(served, 1)), GpuTimeSharing()
        self.made: dict[str, list] = {role: [] for role in served}
        size = read_size(models["teacher"])

        def factory(role):
            command = make_command(served[role].backend.launch, models["teacher"], Doorway(8000, Path("/none"), "key"))
            weights_gib = 2 * size.parameters / GIB
            server = stand_in(self.device, command.argv, weights_gib, size.cache_bytes_per_token, rng)
            self.made[role].append(server)
            return server

        self.pools = {
            role: ReplicaPool(
                role, {role: partial(factory, role)}, ServingConfig(), turns=turns, time_sharing=self.time_sharing
            )
            for role in served
        }
        training = TrainingConfig(iterations=1, batch_size=32, dtype="bfloat16", micro_batch_tokens=5_120)
        self.rank = trainer_memory(read_size(models["student"]), training, longest_tokens=5_120)
        self.trainer = Trainer(self.device, self.rank.resting, self.rank.training, rng)
        self.entered = [self.time_sharing, in_turn(turns, TRAINER, self.trainer)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("moment", ["asleep", "awake"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_teachers_take_turns_around_one_trainer_and_one_is_killed(kind, moment, seed, models):
    async def scenario():
        rng = random.Random(seed)
        gpu = TwoTeachersOnOneGpu(kind, models, rng)
        sleeping = SleepingServers([gpu.time_sharing], timeout_s=600.0)
        failed: list[bool] = []
        doomed: list[str] = []  # killed while they answer

        async def answer(role, server):
            assert server is gpu.made[role][-1]
            held = [gpu.device.held[each] > 10.0 for servers in gpu.made.values() for each in servers]
            assert held.count(True) == 1  # whoever answers is awake alone
            await asyncio.sleep(rng.uniform(0.1, 5.0))
            if role in doomed:
                doomed.remove(role)
                server.kill()
            return role

        async def prompt(ordinal):
            await asyncio.sleep(rng.uniform(0.0, 120.0))
            role, request = rng.choice([*gpu.pools]), LeaseRequest("score", (ordinal,))
            replies = [await ask(gpu.pools[role], partial(answer, role), request=request)]
            if replies[0] != role:  # its server was killed meanwhile
                replies.append(await ask(gpu.pools[role], partial(answer, role), request=request))
            assert replies[-1] == role
            failed.append(len(replies) > 1)

        watches = [gpu.time_sharing.watch, *(pool.watch for pool in gpu.pools.values())]
        async with running(*gpu.entered), alongside(*watches):
            for iteration in range(20):
                async with asyncio.TaskGroup() as batch:
                    for ordinal in range(32):
                        batch.create_task(prompt(32 * iteration + ordinal))
                    if iteration == 7 and moment == "awake":
                        doomed.append("teachers.math")
                await sleeping.sleep()
                if iteration == 7 and moment == "asleep":
                    gpu.made["teachers.math"][-1].kill()
                await gpu.trainer.train()
                async with sleeping.updated():
                    pass
        assert [len(made) for made in gpu.made.values()] == [2, 1]
        assert len(failed) == 20 * 32
        assert moment == "awake" or not any(failed)
        assert gpu.device.most_gib <= CARD_GIB < 2 * gpu.servers[0].gib + gpu.rank.resting  # together they do not fit
        assert all(each.fits for each in per_device(gpu.servers, gpu.rank, 1))

    run_shuffled(scenario(), seed)


@pytest.mark.parametrize("kind", KINDS)
def test_without_turns_and_sizes_the_stand_ins_fail_as_the_real_ones_do(kind, models):
    """Or they would prove nothing."""

    async def scenario(seed):
        gpu = OneGpu(kind, models, seed, is_planned=False)
        async with gpu.open():
            gpu.check()

    failures = []
    for seed in range(12):
        try:
            run_on_virtual_time(scenario(seed))
        except (SpotError, ExceptionGroup) as error:
            failures += [type(each) for each in leaves(error)]
        except AssertionError:
            failures.append(AssertionError)
    assert len(failures) == 12
    assert ProcessDiedError in failures
