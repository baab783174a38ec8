"""Rejects arguments of SGLang's server that a worker does not support, and names the alternatives.

A worker is one scheduler and its tensor-parallel ranks. A command reaches all ranks between the
same two rounds. All ranks therefore serve one version set, and each token has one policy version.
SGLang's other layouts have further schedulers, which a command would not reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.errors import ConfigError


class Refusal(NamedTuple):
    """Reason for rejecting an argument, and its alternative."""

    off: tuple[object, ...]
    """Values that leave the feature off; they are accepted."""
    why: str
    instead: str


_SERVERS = Refusal(
    ("null",),
    "prefill and decode servers are two schedulers that exchange keys and values on CUDA: both "
    "would have to change the version set at the same token of each request, and the prompt's "
    "hidden rows would stay on the prefill server",
    "workers for both (gateway.engine.workers), short prefills (gateway.engine.prefill_tokens)",
)
_SCHEDULERS = Refusal(
    (1, False),
    "it starts further schedulers, which would not receive a version set between the same two "
    "rounds",
    "more workers (gateway.engine.workers)",
)
_HOSTS = Refusal(
    (0, 1, ""),
    "the ranks of a worker rendezvous through a file on one host",
    "one worker per host (gateway.engine.workers) with all GPUs of the host",
)
_MOVING = Refusal(
    (0, False, "none"),
    "experts would move between GPUs during a load of a version",
    "gateway.engine.sglang.expert_parallel_size, with one copy of each expert",
)
_OWN = "it has its own setting, which the memory plan and the slot leases use"
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
    """Raises ConfigError for the first argument that a worker does not support."""
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
