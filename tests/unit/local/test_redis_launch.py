"""A starting Redis is waited for; an external Redis is there or missing, without a wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import ServiceConfig
from paceline.local import redis, supervisor
from paceline.local.services import service


@pytest.mark.parametrize(
    ("durable", "waits_s"), [("redis://127.0.0.1:1", 60.0), ("redis://:word@127.0.0.1:1", 5.0)]
)
async def test_features_in_the_durable_redis_wait_for_it_as_long_as_it_starts(
    durable: str, waits_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def wait(url: str, deadline_s: float) -> None:
        waited.append(deadline_s)

    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(redis, "wait_redis", wait)
    config = ServiceConfig.model_validate(
        {"run": {"dir": str(tmp_path)}, "redis": {"durable_url": durable}}
    )
    launch = supervisor.launch_of(service("redis_features"), config, ())
    assert launch.healthy is not None
    await launch.healthy(60.0)
    assert waited == [waits_s]
