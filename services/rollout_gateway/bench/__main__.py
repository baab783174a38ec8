"""`python -m rollout_gateway.bench NAME [--json FILE] ...`."""

from __future__ import annotations

from paceline.bench.__main__ import main

BENCHES = {
    "bandit": "rollout_gateway.bench.bandit",
    "engine": "rollout_gateway.bench.engine",
    "gateway": "rollout_gateway.bench.gateway",
    "sglang": "rollout_gateway.bench.sglang",
}

if __name__ == "__main__":
    main(BENCHES, "rollout_gateway.bench")
