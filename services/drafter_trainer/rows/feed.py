"""Reads captured rows from their stream and decodes them in a thread, with or without a lease."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from paceline import telemetry
from paceline.errors import DataLoss, ResourceExhausted, Unavailable
from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.metrics import SAMPLES_DROPPED
from paceline.services.drafter_trainer.rows.sample import FeatureSample, sample_from
from paceline.streams import Entry, RedisStream, decode_features
from paceline.telemetry import names, span

GROUP, CONSUMER = "drafter", "rank0"
ENTRIES_PER_READ = 32
"""Small, so that a batch of long rows does not delay the rest."""
READ_S = 1.0
"""Seconds that a read waits for rows."""
RETRY_S = 1.0
OPEN_S = 10.0
CLOSE_S = 5.0

log = telemetry.get_logger("drafter_trainer.feed")


class RowFeed:
    """Passes every sample to `take`, from its thread; entries leave the stream once decoded.

    While Redis is away or full, only the rows that it drops are lost.
    """

    def __init__(
        self,
        open_stream: Callable[[], RedisStream],
        target: ModelConfig,
        take: Callable[[list[FeatureSample]], None],
    ) -> None:
        """`open_stream`: called in the thread, which needs its own connections."""
        self._open_stream, self._target, self._take = open_stream, target, take
        self._dropped: Counter[str] = Counter()  # counted by the thread
        self._counting = threading.Lock()
        self._opened = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._following: asyncio.Task[None] | None = None
        self._holds = True  # entries of an earlier process or a failed read
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="row-feed", daemon=True)

    @property
    def dropped(self) -> Counter[str]:
        """Entries that yielded no sample so far, by reason."""
        with self._counting:
            return self._dropped.copy()

    def start(self) -> None:
        """Returns once the group exists, so that no later batch is missed, or after OPEN_S. If
        Redis is away, the group is created later.
        """
        self._thread.start()
        self._opened.wait(OPEN_S)

    def check(self) -> None:
        """Raises the error that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the thread."""
        if self._loop is not None and self._following is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._following.cancel)
            self.join(CLOSE_S)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            raise

    async def _main(self) -> None:
        self._loop, stream = asyncio.get_running_loop(), self._open_stream()
        self._following = asyncio.ensure_future(self._follow(stream))
        try:
            await self._following
        finally:
            await stream.close()

    async def _follow(self, stream: RedisStream) -> None:
        while True:
            try:
                if not self._opened.is_set():
                    await stream.create_group(GROUP)
                    self._opened.set()
                await self._read(stream)
            except (ResourceExhausted, Unavailable, TimeoutError) as error:
                self._holds = True
                log.warning("features cannot be read now", error=str(error) or "no answer in time")
                await asyncio.sleep(RETRY_S)

    async def _read(self, stream: RedisStream) -> None:
        async with asyncio.timeout(2 * READ_S):
            entries = await stream.unacked(GROUP, CONSUMER) if self._holds else []
            self._holds = False
            entries += await stream.read(GROUP, CONSUMER, ENTRIES_PER_READ, READ_S)
        if not entries:
            return
        with span(
            names.FEATURES_READ,
            kind="consumer",
            links=[entry.fields.get("traceparent", "") for entry in entries],
        ):
            usable = {
                entry.id: sample
                for entry in entries
                if (sample := await self._decode(stream, entry)) is not None
            }
            self._take(list(usable.values()))
            await stream.ack(GROUP, list(usable), delete=True)

    async def _decode(self, stream: RedisStream, entry: Entry) -> FeatureSample | None:
        try:
            sample = sample_from(decode_features(entry.fields, entry.payload), self._target)
            return replace(sample, traceparent=entry.fields.get("traceparent", ""))
        except DataLoss as error:
            with self._counting:
                self._dropped["unusable"] += 1
            SAMPLES_DROPPED.record(reason="unusable")
            log.warning("feature batch cannot be used", entry=entry.id, error=str(error))
            await stream.dead_letter(GROUP, entry, str(error))
            return None
