"""A Ray cluster on loopback: prints its address, and ends when its input does.

Arguments, if any: bundles of a placement group, a CPU each, its name, and the address of a cluster
that is there already.
"""

from __future__ import annotations

import asyncio
import sys

from paceline.cluster.joined import joined
from paceline.local.patience import patient


async def head(bundles: str = "0", name: str = "", address: str | None = None) -> None:
    async with joined(address) as ray:
        if name:
            group = ray.util.placement_group(
                [{"CPU": 1.0}] * int(bundles), strategy="SPREAD", name=name
            )
            assert group.wait(patient(60))
        print(ray.get_runtime_context().gcs_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(head(*sys.argv[1:]))
