"""Runs a Ray cluster on loopback: prints its address, and exits at the end of its input."""

from __future__ import annotations

import asyncio
import sys

from paceline.cluster.joined import joined


async def head() -> None:
    async with joined(None) as ray:
        print(ray.get_runtime_context().gcs_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(head())
