"""One attempt from the process group to the outcome. The first module of the runtime that imports torch."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from hpjob.core.run_records import Outcome
from hpjob.plan.model import Axis
from hpjob.runtime.agreement import StopAgreement, on_rank_zero, wait_for_all
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.keeper import CheckpointKeeper
from hpjob.runtime.checkpoint.load import find_checkpoint, load_checkpoint
from hpjob.runtime.checkpoint.manifest import Manifest, Scalar, fingerprint
from hpjob.runtime.checkpoint.notes import connect
from hpjob.runtime.checkpoint.saver import SaveParts, Saver
from hpjob.runtime.data.batches import BatchReader
from hpjob.runtime.data.sample_log import SampleLog
from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.engine import Engine
from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.health.loss_watch import LossWatch, read_history
from hpjob.runtime.health.start import StartChecks, usable_device, watch_peers
from hpjob.runtime.hugging_face.load import load_weights
from hpjob.runtime.loop import Training, TrainLoop
from hpjob.runtime.mesh import Mesh, build_mesh
from hpjob.runtime.rank import Rank
from hpjob.runtime.records import AttemptRecords
from hpjob.runtime.rendezvous import PeerStore, join, meet
from hpjob.runtime.settings import AttemptSettings
from hpjob.runtime.signals import StopRequest, describe
from hpjob.runtime.timeouts import Timeouts
from hpjob.runtime.watcher import PeerWatcher

log = logging.getLogger(__name__)
_CHECKSUM_LIMIT_BYTES = 1 << 30


class Session:
    """The parts of an attempt, built in order; a stop request is obeyed between any two of them."""

    def __init__(
        self, rank: Rank, settings: AttemptSettings, reporter: FailureReporter, watcher: PeerWatcher, stop: StopRequest
    ) -> None:
        self._rank = rank
        self._recipe, self._plan = settings.recipe, settings.plan
        self._reporter = reporter
        self._watcher = watcher
        self._request = stop
        self._stop = StopAgreement(stop)
        self._records = AttemptRecords(rank)
        self._checkpoints = CheckpointFolder(rank.run_dir, rank.attempt.index)
        self._timeouts = Timeouts.from_env()

    def run(self) -> None:
        """Join the other ranks, resume, train, and leave together.

        Raises:
            Exception: Whatever went wrong on this rank; the caller reports it.
        """
        torch.use_deterministic_algorithms(self._recipe.training.deterministic)
        device = usable_device(self._rank, self._plan)
        self._records.event("joining", world_size=self._rank.world_size, device=str(device))
        store = meet(self._rank, self._timeouts)
        peers = PeerStore(store.host, store.port, rank=self._rank.rank, world_size=self._rank.world_size)
        hangs = watch_peers(self._watcher, self._reporter, peers, self._plan)
        checks = StartChecks(self._reporter, self._records, self._plan, device)
        checks.nodes(peers, self._timeouts.setup_s)
        join(self._rank, device, store, self._timeouts)
        if not self._left_early():
            self._train(device, checks)
        self._leave_together()
        hangs.stop()

    def _train(self, device: torch.device, checks: StartChecks) -> None:
        self._records.event("building", plan=self._plan.summary)
        mesh = build_mesh(self._plan, device.type)
        checks.links(mesh)
        dataset = TokenDataset(self._recipe)
        self._verify_data(dataset)
        engine = Engine(self._plan, self._recipe, mesh, device)
        if self._left_early():
            return
        identity = fingerprint(self._recipe, dataset.meta.tokens_sha256)
        resumed = self._resume(engine, identity)
        steps_again = self._records.open_metrics(resumed.step if resumed else 0)
        losses = self._watch_losses(engine)
        training = Training(
            recipe=self._recipe,
            plan=self._plan,
            engine=engine,
            batches=BatchReader(dataset, mesh.dp_rank, mesh.dp_size, device, self._sample_log(mesh)),
            keeper=self._keeper(engine, identity, device, resumed.step if resumed else 0),
            stop=self._stop,
            records=self._records,
            reporter=self._reporter,
            losses=losses,
            timeouts=self._timeouts,
        )
        first_step = (resumed.step if resumed else 0) + 1
        self._records.event("training", first_step=first_step, steps_again=steps_again)
        TrainLoop(training, resumed).run()

    def _watch_losses(self, engine: Engine) -> LossWatch:
        settings = self._recipe.loss_watch
        history, skips = on_rank_zero(lambda: read_history(self._rank.run_dir.metrics, settings.window))
        losses = LossWatch(settings, history=history, skips=skips, half_precision=self._plan.precision == "fp16")
        if losses.decides_updates:
            engine.accepts_update = losses.accepts
        return losses

    def _sample_log(self, mesh: Mesh) -> SampleLog | None:
        """One rank of each data-parallel position keeps it, if the recipe asks for it."""
        first = all(mesh.coordinate(axis) == 0 for axis in (Axis.PP, Axis.SP, Axis.TP))
        return SampleLog(self._rank.attempt, mesh.dp_rank) if first and self._recipe.data.log_samples else None

    def _keeper(
        self, engine: Engine, identity: dict[str, Scalar], device: torch.device, saved_step: int
    ) -> CheckpointKeeper:
        parts = SaveParts(
            folder=self._checkpoints,
            engine=engine,
            plan=self._plan,
            fingerprint=identity,
            settings=self._recipe.checkpoint,
            store=connect(self._rank.attempt),
            device=device,
            ranks_on_node=self._rank.ranks_on_node,
            timeout_s=self._timeouts.setup_s,
            make_durable=self._before_publishing,
        )
        return CheckpointKeeper(
            Saver(parts), self._recipe.checkpoint, self._records, saved_step, self._reporter.note_checkpoint
        )

    def _before_publishing(self) -> None:
        """What must hold before a checkpoint gets its name; rank 0 asks in the thread of the save."""
        self._request.refuse_if_superseded()
        self._records.sync_metrics()

    def _verify_data(self, dataset: TokenDataset) -> None:
        """Compare small token files with their checksum; large ones only by size, which was done."""
        if self._rank.rank == 0 and dataset.path.stat().st_size <= _CHECKSUM_LIMIT_BYTES:
            dataset.verify_checksum()

    def _resume(self, engine: Engine, identity: dict[str, Scalar]) -> Manifest | None:
        leftovers = on_rank_zero(self._checkpoints.clean_leftovers)
        if leftovers:
            self._records.event("leftovers-deleted", names=leftovers)
        manifest = find_checkpoint(self._checkpoints, identity, self._report_damage)
        if manifest is None:
            torch.manual_seed(self._recipe.training.seed)
            self._load_initial_weights(engine)
            return None
        self._records.event("loading", step=manifest.step)
        started = time.perf_counter()
        load_checkpoint(self._checkpoints, manifest, engine)
        self._reporter.checkpoint_step = manifest.step
        duration = time.perf_counter() - started
        self._records.event("resumed", step=manifest.step, saved_by_plan=manifest.plan, duration_s=duration)
        log.info("resumed from the checkpoint of step %d (%s) in %.2f s", manifest.step, manifest.plan, duration)
        return manifest

    def _load_initial_weights(self, engine: Engine) -> None:
        folder = self._recipe.training.initial_weights
        if folder is None:
            return
        self._records.event("loading-weights", folder=folder)
        load_weights(Path(folder), self._recipe.model, engine.parameters)

    def _report_damage(self, step: int, problem: str) -> None:
        self._records.event("checkpoint-damaged", step=step, reason=problem)
        if self._rank.rank == 0:
            log.warning("checkpoint of step %d is damaged and set aside: %s; using the one before", step, problem)

    def _left_early(self) -> bool:
        """Obey a stop request that came before the first step; tell whether there was one."""
        code = self._stop.check()
        if not code:
            return False
        steps = on_rank_zero(self._checkpoints.steps)
        newest = steps[0] if steps else 0
        reason = f"{describe(code)} during set-up"
        self._records.outcome(Outcome(kind="preempted", step=newest, reason=reason, time=time.time()))
        self._records.event("preempted", step=newest, reason=reason)
        self._records.remove_stop_file()
        log.info("preempted during set-up: %s; newest checkpoint is step %d", reason, newest)
        return True

    def _leave_together(self) -> None:
        """Wait until rank 0 has written the outcome. All is saved by now, so a peer that is gone is no failure."""
        self._records.close()
        self._watcher.stop()
        try:
            wait_for_all()
        except RuntimeError as error:
            log.warning("a rank left early: %s", error)


def run_attempt(
    rank: Rank, settings: AttemptSettings, reporter: FailureReporter, watcher: PeerWatcher, stop: StopRequest
) -> None:
    """Run one attempt on this rank; see :class:`Session`."""
    Session(rank, settings, reporter, watcher, stop).run()
