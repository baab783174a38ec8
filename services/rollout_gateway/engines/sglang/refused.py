"""Names the arguments of SGLang's server that a worker cannot have, and what stands for them.

A worker is one scheduler and its tensor-parallel ranks: what it is told between two rounds reaches
all of them there, so that they serve one version set, and a request has one policy version at each
position. SGLang's other layouts have schedulers that nobody tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.errors import ConfigError


class Refusal(NamedTuple):
    """Why an argument is refused."""

    off: tuple[object, ...]
    """Values that change nothing."""
    why: str
    instead: str


_SERVERS = Refusal(
    ("null",),
    "prefill and decode servers are two schedulers with a transfer of keys and values on CUDA "
    "between them: a version set would have to change on both at one place of every request, and "
    "hidden rows of the prompt would stay behind",
    "workers that do both (gateway.engine.workers), short prefills (gateway.engine.prefill_tokens)",
)
_SCHEDULERS = Refusal(
    (1, False),
    "it starts schedulers of their own, or parts of them, that a version set would not reach "
    "between the same two rounds",
    "more workers (gateway.engine.workers)",
)
_HOSTS = Refusal(
    (0, 1, ""),
    "the ranks of a worker meet at a file of their host",
    "a worker a host (gateway.engine.workers), of as many GPUs as that has",
)
_MOVING = Refusal(
    (0, False, "none"),
    "experts then move between GPUs while versions are loaded, which nothing here waits for",
    "gateway.engine.sglang.expert_parallel_size, with every expert once",
)
_OWN = "it has a setting, which the plan of memory and the leases of slots go by"
REFUSED: Mapping[str, Refusal] = {
    "disaggregation_mode": _SERVERS,
    **dict.fromkeys(
        (
            "dp_size",
            "enable_dp_attention",
            "pp_size",
            "attn_cp_size",
            "dcp_size",
            "moe_dp_size",
            "dwdp_size",
        ),
        _SCHEDULERS,
    ),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), _HOSTS),
    **dict.fromkeys(
        (
            "enable_eplb",
            "ep_num_redundant_experts",
            "elastic_ep_backend",
            "enable_elastic_expert_backup",
        ),
        _MOVING,
    ),
    "tp_size": Refusal((), _OWN, "gateway.engine.sglang.tensor_parallel_size"),
    "ep_size": Refusal((), _OWN, "gateway.engine.sglang.expert_parallel_size"),
}
_PREFIXES = {"disaggregation_": _SERVERS._replace(off=()), "encoder_": _SERVERS._replace(off=())}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first argument that a worker cannot have."""
    for name, value in arguments.items():
        begun = (found for prefix, found in _PREFIXES.items() if name.startswith(prefix))
        refusal = REFUSED.get(name) or next(begun, None)
        if refusal is None or any(type(one) is type(value) and one == value for one in refusal.off):
            continue  # by type, since True == 1
        off = ", ".join(f"{one!r}" for one in refusal.off) or "nothing"
        raise ConfigError(
            f"gateway.engine.sglang.arguments.{name} is not served: {refusal.why}",
            seen=value,
            allowed=f"{off}; instead: {refusal.instead}",
        )
