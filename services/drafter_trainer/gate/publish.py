"""Pushes promoted drafters to the gateway."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from paceline import errors
from paceline.local.patience import patient
from paceline.services.drafter_trainer.messages import Judged
from paceline.telemetry import get_logger
from paceline.tensors import decode_safetensors
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weight_documents import ACCEPTANCE, CONFIG
from paceline.weights import PushReport, build_manifest, push, push_weights
from paceline.whole_files import check_hashes

WORTH_ANOTHER_TRY = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.StaleEpoch,
    errors.ResourceExhausted,
)

log = get_logger("paceline.services.drafter_trainer.gate.publish")


async def push_drafter(
    channel: grpc.aio.Channel, decision: Judged, context: CommandContext
) -> PushReport:
    """Prepare and Push of the candidate at `decision.path`, with its config.json beside its
    tensors.

    Raises DataLoss and the errors of push_weights.
    """
    folder = Path(decision.path)
    await asyncio.to_thread(check_hashes, folder)
    try:
        data = await asyncio.to_thread((folder / "model.safetensors").read_bytes)
        config = await asyncio.to_thread((folder / "config.json").read_text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.DataLoss(
            "the promoted drafter is not where the rank wrote it", seen=str(error)
        ) from error

    shift = decision.shift
    measured = {ACCEPTANCE: shift.to_json()} if shift is not None else {}
    tensors = list(decode_safetensors(data).values())
    manifest = build_manifest(
        WEIGHT_TARGET_DRAFTER,
        decision.drafter_version,
        tensors,
        lm_head_hash=decision.lm_head_hash,
        metadata={"speculator": decision.kind, CONFIG: config, **measured},
    )
    deadline_s = patient(push.push_deadline_s(manifest.total_bytes))
    return await push_weights(channel, manifest, tensors, context, deadline_s=deadline_s)


class Promoter:
    """At most one promoted drafter at a time; a newer one replaces an older one.

    A push may outlive its activation, since training never waits for the gateway. The next
    activation reports results that the coordinator has not received, and repeats a failed push.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._waiting: Judged | None = None
        # in progress, or done and not yet collected
        self.push: asyncio.Task[Judged] | None = None

    def start(self, decision: Judged, context: CommandContext, news: asyncio.Queue[Any]) -> None:
        """Pushes a promoted drafter; the finished task is put into `news`."""
        self.cancel()
        self.push = asyncio.create_task(self._attempt(decision, context))
        self.push.add_done_callback(news.put_nowait)

    def start_again(self, context: CommandContext, news: asyncio.Queue[Any]) -> None:
        """Puts the push of an earlier activation into `news`, once it is done. If that push has not
        brought its drafter to the gateway, the drafter is pushed again.
        """
        if self.push is not None:
            self.push.add_done_callback(news.put_nowait)
        elif self._waiting is not None:
            self.start(self._waiting, context, news)

    def collect_outcome(self) -> Judged | None:
        """The decision after the gateway's answer: promoted or refused. None without an answer."""
        if self.push is None or not self.push.done():
            return None
        outcome, self.push = self.push.result(), None
        return outcome

    def cancel(self) -> None:
        """Drops the drafter in progress."""
        if self.push is not None:
            self.push.cancel()
        self.push = self._waiting = None

    async def _attempt(self, decision: Judged, context: CommandContext) -> Judged:
        version = decision.drafter_version
        try:
            report = await push_drafter(self._channel, decision, context)
        except errors.PacelineError as error:
            if isinstance(error, WORTH_ANOTHER_TRY):
                self._waiting = decision
            log.warning("drafter not prepared", drafter_version=version, error=str(error))
            return replace(decision, decision="refused")
        log.info(
            "drafter prepared", drafter_version=version, bytes=report.bytes, seconds=report.push_s
        )
        return decision
