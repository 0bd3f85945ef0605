"""One rank of the trainer: takes batches, steps the student, publishes its weights.

It does not know the method that made the supervision. Start reading at `StudentTrainer.train_share`. The loss is in
`loss.py`, who trains what is in `batching.py`, and collectives are in `parallel.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from spot_async.base.processes.resources import cpu_type
from spot_async.base.seeds import derive_seed
from spot_async.errors import TrainerError
from spot_async.trainer.accumulator import Accumulator
from spot_async.trainer.batching import Layout, MicroBatch, check_sample, input_of, mini_batches, update_shares
from spot_async.trainer.checkpoint import CheckpointSaver, Done, load_checkpoint
from spot_async.trainer.compiling import compile_layers, try_compiled
from spot_async.trainer.feed import BatchFeed
from spot_async.trainer.following import FollowingTeachers
from spot_async.trainer.loading import decoder_layers, new_student, read_parameters
from spot_async.trainer.lora import add_adapters
from spot_async.trainer.loss import LossParts
from spot_async.trainer.messages import Batch, Save, Share, UpdateShare
from spot_async.trainer.metrics import Meters, Tally
from spot_async.trainer.model import ResponseLogprobs, recompute_layers
from spot_async.trainer.optimizer import new_optimizer
from spot_async.trainer.packing import attend_documents_at_once, packs
from spot_async.trainer.parallel import Strategy, local
from spot_async.trainer.publishing import Published, WeightWriter
from spot_async.trainer.settings import TrainerSettings, attention_words, learning_rate
from spot_async.trainer.streaming import published_types
from spot_async.types import FloatArray, Live, TrainReport, WeightSnapshot, WeightVersion

CULPRITS_NAMED = 3
# A decoder layer's matrices have about 12 hidden² numbers. To attend to a token takes two products of hidden numbers.
LINEAR_WORK = 12  # in units of half of the latter


def train_batches(trainer: StudentTrainer, feed: BatchFeed) -> NoReturn:
    """Train on every batch until the process is ended, and save when asked to.

    After an error only answer, always with that error.
    """
    feed.ready(trainer.cpu)
    try:
        while True:
            match feed.next(trainer.divide):
                case Share(is_look=True) as share:
                    (update,) = share.updates
                    trainer.keep(feed.looked(share.iteration, trainer.losses.look(update)))
                case Share() as share:
                    published = partial(feed.published, share.iteration + 1)
                    feed.trained(share.iteration, trainer.train_share(share, published))
                case Save(step, directory):
                    trainer.begin_to_save(Path(directory), partial(feed.saved, step))
    except TrainerError as error:
        feed.refuse(error)


class StudentTrainer:
    """The student, its optimiser, and one iteration of training. All ranks call it alike."""

    def __init__(self, settings: TrainerSettings, strategy: Strategy, device: torch.device) -> None:
        self._settings = settings
        self._training = settings.training
        self._strategy = strategy
        self._device = device
        # What bits depend on. The environment may ask for another instruction set than the CPU's best.
        self.cpu = f"{cpu_type()}, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
        dtype = torch.bfloat16 if self._training.dtype == "bfloat16" else torch.float32
        self.model = new_student(settings.model_directory, settings.longest_sequence)
        types = published_types(self.model, Path(settings.model_directory), dtype)
        is_packed = packs(
            self.model, settings.model_directory, self._training.packing, is_first_rank=strategy.rank == 0
        )
        self._layout = Layout(
            is_packed,
            token_budget=self._training.tokens_per_pass(is_packed=is_packed),
            linear_work=LINEAR_WORK * self.model.config.get_text_config().hidden_size,
        )
        if self._training.lora is not None:
            add_adapters(self.model, self._training.lora, settings.seed, types)
        if self._training.compile:
            compile_layers(self.model)
        if self._training.recompute_layers:
            recompute_layers(self.model, self._training)
        student = ResponseLogprobs(self.model, settings.temperature)
        forward = strategy.prepare(
            student,
            decoder_layers(self.model),
            device,
            self._training.dtype,
            fill=partial(read_parameters, self.model, settings.model_directory),
        )
        self.losses = Accumulator(self._training, self._layout, forward, strategy, device)
        self._trained = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = new_optimizer(self._trained, self._training)
        if is_packed and device.type == "cuda" and dtype == torch.bfloat16:
            attend_documents_at_once(self.model, device)
        self.attention = attention_words(self.model.config._attn_implementation)
        if self._training.compile:
            try_compiled(
                forward,
                student,
                device,
                self._training.dtype,
                is_packed=is_packed,
                is_first_rank=strategy.rank == 0,
            )
        writer = partial(
            WeightWriter,
            student_directory=Path(settings.model_directory),
            end_token_ids=settings.end_token_ids,
            dtype=dtype,
            types=types,
            keep=self._training.keep_weights,
            lora=self._training.lora,
            writes=strategy.rank == 0,
        )
        self._publisher = writer(settings.weights_directory)
        self._publisher.try_out(self.model)
        self._teachers = FollowingTeachers(settings, self.model, self._optimizer, writer)
        self._meters = Meters(self._training, Path(settings.model_directory), device)
        self._saver = CheckpointSaver(strategy, device, is_offloaded=self._training.offload != "none")
        # For which checkpoints, and the writing of weights, held up training since the last report.
        self._checkpoint_s = self._publish_s = 0.0
        self._looked_at: list[bytes] = []  # of rank 0, which divides a look
        self._old_logprobs: dict[bytes, FloatArray] = {}
        self.step = 0
        if settings.resume is not None:
            self.step = settings.resume.step
            self._continue_from(Path(settings.resume.directory))

    def train(self, batch: Batch) -> TrainReport:
        """Train one iteration on a batch that every rank has. See `train_share`."""
        return self.train_share(self.divide(batch)[self._strategy.rank], published=lambda files, reason: None)

    def divide(self, batch: Batch) -> Sequence[Share]:
        """Return each rank's share of a batch. Raises `TrainerError` for a sample that cannot be trained."""
        vocab_size = self.model.config.get_text_config().vocab_size
        for sample in batch.samples:
            check_sample(sample, vocab_size=vocab_size, needs_reference=self._training.reference_kl > 0)
        inputs, ranks = [*map(input_of, batch.samples)], self._strategy.ranks
        if batch.is_look:
            self._looked_at = inputs
            return [
                Share(batch.iteration, (each,), is_look=True)
                for each in update_shares(batch.samples, ranks, self._layout)
            ]
        seed = derive_seed(self._settings.seed, "mini-batches", batch.iteration)
        old, self._old_logprobs = self._old_logprobs, {}
        known = old if old.keys() >= {*inputs} else None
        updates = [
            update_shares(mini_batch, ranks, self._layout, known if self._training.recomputes_apart(number) else None)
            for number, mini_batch in enumerate(mini_batches(batch.samples, self._training.mini_batch_size, seed))
        ]
        return [Share(batch.iteration, tuple(each[rank] for each in updates)) for rank in range(ranks)]

    def keep(self, found: Mapping[int, Live]) -> None:
        """Keep what a look found, by places in the batch, as log pi_old of the next batch. Rank 0 divides it."""
        self._old_logprobs = {own: found[place].logprobs for place, own in enumerate(self._looked_at)}

    def train_share(self, share: Share, published: Published) -> TrainReport:
        """Train one iteration, with the other ranks: every mini-batch once, then publish.

        Iteration i makes the weights of step i + 1. `published` is called once they are written, which may be later and
        in another thread (`TrainerSettings.publishes_beside`).

        A batch without samples makes no update, and the weights are published as they are.
        """
        started, held_s = time.perf_counter(), self._checkpoint_s
        iteration, updates = share.iteration, share.updates
        rate = learning_rate(self._training, iteration, self._settings.iterations)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        tally = Tally(self._device, step=iteration)
        passes = self.losses.passes(updates)
        norms = []
        for number, (update, batches) in enumerate(zip(updates, passes, strict=True), start=1):
            where = f"iteration {iteration + 1}, mini-batch {number} of {len(updates)}"
            norms.append(self._update(update, batches, tally, where, has_moved=number > 1))
        self._strategy.sum(tally.sums)
        self._strategy.max(tally.maxima)
        metrics = tally.report(grad_norms=norms, learning_rate=rate)
        train_s = time.perf_counter() - started - self._publish_s - (self._checkpoint_s - held_s)
        metrics |= {"train_s": train_s, "tokens_per_s": metrics["tokens"] / train_s}
        performance = self._meters.read(updates, self._strategy, train_s)
        snapshot = self._publish(iteration + 1, published)
        teachers = self._teachers.snapshots(snapshot)
        if self._settings.shares_devices:  # the student's server needs the memory that torch would keep
            self._optimizer.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        metrics["publish_s"], self._publish_s = self._publish_s, 0.0
        if self._checkpoint_s:
            metrics["checkpoint_s"], self._checkpoint_s = self._checkpoint_s, 0.0
        self.step = iteration + 1
        return TrainReport(snapshot=snapshot, metrics=metrics, performance=performance, teachers=teachers)

    def begin_to_save(self, directory: Path, done: Done) -> None:
        """Begin to write a checkpoint of the state between two iterations. The next one may be trained at once."""
        started = time.perf_counter()
        if not self._settings.publishes_whole(self.step):
            self._publisher.complete(self.model, self.step)
        self._saver.begin(directory, self.step, self.model, self._optimizer, done)
        self._checkpoint_s += time.perf_counter() - started

    def _update(
        self,
        update: UpdateShare,
        batches: Sequence[MicroBatch],
        tally: Tally,
        where: str,
        *,
        has_moved: bool,
    ) -> float:
        """Make one optimiser step over all ranks; return the gradient norm.

        `where` names the step in errors. `has_moved` says that the iteration has already changed the weights.
        """
        self._optimizer.zero_grad()
        losses = []
        for number, batch in enumerate(batches, start=1):
            self._strategy.before_pass(is_last=number == len(batches))
            losses.append(self.losses.add(batch, update, tally, has_moved=has_moved).total.detach())
        self._strategy.reduce_gradients(self._trained)
        norm = self._strategy.clip_grad_norm(self._trained, self._training.max_grad_norm)
        finite = math.isfinite(norm) and all(map(math.isfinite, losses))
        # All ranks must agree to stop. One that raised alone would leave the others waiting in a collective.
        if self._strategy.max(torch.tensor(float(not finite), device=self._device)) > 0:
            raise TrainerError(f"{where}: {self._culprits(update)}; the optimiser was not stepped")
        self._checkpoint_s += self._saver.wait_before_step()
        self._publish_s += self._publisher.wait()
        self._optimizer.step()
        return norm

    def _culprits(self, update: UpdateShare) -> str:
        """Say which samples give a loss or gradient that is not finite, by trying each alone.

        All ranks try at the same time, those that do not have the sample without any. They share what they find, since
        each may see only a shard.
        """
        found = []
        for number, name in enumerate(update.names):
            self._optimizer.zero_grad()
            places = [number] if number in update.samples else []
            batch = self.losses.micro_batch(update, places, self._training.behavior == "recomputed")
            parts = self.losses.add(batch, update, Tally(self._device, step=0), has_moved=True)
            gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
            _, *losses = parts
            are_bad = [not _finite(loss) for loss in losses]
            are_bad.append(not all(map(_finite, gradients)))
            marks = self._strategy.max(torch.tensor(are_bad, dtype=torch.float32, device=self._device))
            *of_losses, gradient = marks.tolist()
            bad = [f"{name} loss" for name, mark in zip(LossParts._fields[1:], of_losses, strict=True) if mark]
            if not bad and gradient:
                bad = ["gradient"]
            if bad:
                found.append(f"non-finite {' and '.join(bad)} in sample {name}")
        more = f", and {len(found) - CULPRITS_NAMED} samples more" if len(found) > CULPRITS_NAMED else ""
        return ", ".join(found[:CULPRITS_NAMED]) + more or "non-finite gradient, though each sample's own is finite"

    def _continue_from(self, directory: Path) -> None:
        """Load a checkpoint of `step`, and publish its weights again if they are gone."""
        load_checkpoint(directory, self.step, self.model, self._optimizer, self._strategy)
        if self._is_gone(self._publisher.path(self.step)):
            self._publisher.publish(self.model, self.step)
        self._teachers.publish(self.step, lambda directory, step: self._is_gone(directory))

    def _is_gone(self, published: Path) -> bool:
        """Return whether a directory is gone. Rank 0 decides, because others may see its new one before they look."""
        is_gone = self._strategy.rank == 0 and not published.exists()
        return self._strategy.max(torch.tensor(float(is_gone), device=self._device)).item() > 0

    def _publish(self, step: int, published: Published) -> WeightSnapshot:
        """Publish the weights of a step, or begin to; first those of teachers that follow, which are told with them."""
        started = time.perf_counter()
        is_whole = self._settings.publishes_whole(step)
        # Done by the first update, if there was one.
        self._checkpoint_s += self._saver.wait_before_step()
        self._publisher.wait()
        self._teachers.advance(step)
        publish_teachers = partial(self._teachers.publish, step, lambda directory, had: had == step)
        if self._settings.publishes_beside:
            self._publisher.begin(self.model, step, is_whole=is_whole, first=publish_teachers, done=published)
        else:
            publish_teachers()
            self._publisher.publish(self.model, step, is_whole=is_whole)
            published(self._publisher.files, "")
        self._publish_s += time.perf_counter() - started
        return WeightSnapshot(
            directory=str(self._publisher.path(step)), version=WeightVersion(self._settings.lineage, step)
        )


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
