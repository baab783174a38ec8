"""Shared by the tests of a served SGLang: launch, requests, and the oracle's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from remote_engine import WorkerClient
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec, row_layout
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb

DEMO = Path(__file__).parents[1] / "examples" / "demo"
CPU_KERNELS = Path(__file__).parent / "sglang" / "cpu_kernels"


@dataclass
class Kept:
    """A sink that keeps all rows, by request."""

    rows: dict[int, dict[int, tuple[int, int, bytes]]] = field(
        default_factory=dict
    )  # position -> token, version, bytes
    twice: int = 0

    def write(
        self,
        request_ids: Any,
        positions: Any,
        token_ids: Any,
        policy_version: int,
        hidden: Any,
        parents: Any = None,
    ) -> int:
        for number, position, token, row in zip(
            request_ids, positions, token_ids, hidden, strict=True
        ):
            mine = self.rows.setdefault(int(number), {})
            self.twice += int(position) in mine
            mine[int(position)] = (int(token), policy_version, row.tobytes())
        return len(request_ids)

    def of(self, number: int, tokens: Sequence[int]) -> torch.Tensor:
        """Rows 0 .. T - 2 of a request's T tokens, fp32 [T - 1, width]; no row may be absent or of
        another token.
        """
        mine = self.rows[number]
        assert sorted(mine) == list(range(len(tokens) - 1))
        assert [mine[i][0] for i in range(len(tokens) - 1)] == list(tokens[:-1])
        return torch.from_numpy(
            np.stack([np.frombuffer(mine[i][2], dtype=np.float32) for i in range(len(tokens) - 1)])
        )


class Served:
    """One SGLang with numbered requests."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings = {
            "dtype": "float32",
            "features_dtype": "float32",
            "device": "cpu",
            "max_batch": 8,
            **settings,
        }
        spec = SGLangSpec(**settings)
        self.client = WorkerClient(
            "sglang", spec.model_dump(mode="json"), folder, 4 * row_layout(spec).width
        )
        self.kept = self.client.rows = Kept()
        self.spec = spec
        self._numbers = 0
        self._emitted = 0  # token count at the last send
        self._done: dict[int, list[Chunk]] = {}

    def send(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[int]:
        """Queue requests; returns their numbers. `arm`, `capture` and `stream` belong to the
        request, the other options to the sampling.
        """
        outer = {"forced_arm": options.pop("arm", ""), "capture": options.pop("capture", True)}
        outer["stream"] = options.pop("stream", False)
        first, self._numbers = self._numbers, self._numbers + len(prompts)
        sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **options}
        seeds = sampling.pop("seeds", [7 + i for i in range(len(prompts))])
        messages = [
            wire.request_to(
                Request(first + i, tuple(prompt), Sampling(seed=seeds[i], **sampling), **outer)
            )
            for i, prompt in enumerate(prompts)
        ]
        self._emitted = self.health().tokens_emitted
        self.client.send(enqueue=pb.EnqueueRequests(requests=messages))
        return list(range(first, self._numbers))

    def wait(self, numbers: Sequence[int]) -> list[list[Chunk]]:
        """Waits for the end of the requests; returns all their chunks."""
        while not all(
            any(chunk.finish for chunk in self._done.get(number, [])) for number in numbers
        ):
            self.collect()
            if not all(
                any(chunk.finish for chunk in self._done.get(number, [])) for number in numbers
            ):
                self.client.wait()
        return [self._done[number] for number in numbers]

    def collect(self) -> None:
        """Sort received chunks by request."""
        for chunk in self.client.chunks:
            self._done.setdefault(chunk.request_id, []).append(chunk)
        self.client.chunks.clear()

    def tokens(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Response tokens of all prompts, run together."""
        return [said(chunks) for chunks in self.wait(self.send(prompts, **options))]

    def health(self) -> pb.WorkerHealth:
        return self.client.ask(get_health=pb.GetHealth()).health

    def rounds(self, count: int) -> None:
        """Waits until so many tokens have been emitted since the last requests were sent; the
        requests may have ended by then. Raises AssertionError if the tokens never arrive.
        """
        until = time.monotonic() + patient(60)
        while self.health().tokens_emitted < self._emitted + count:
            assert time.monotonic() < until, f"{self.health().tokens_emitted - self._emitted} came"


def said(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def stock(
    engine: dict[str, Any], prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """Greedy answers of the unpatched SGLang with these arguments; see sglang/stock_engine.py."""
    task = {"engine": {"port": free_port(), **engine}, "prompts": prompts, "new_tokens": new_tokens}
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # SGLang compiles one small function of its tree drafting, which takes seconds
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(CPU_KERNELS),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "sglang" / "stock_engine.py")],
        input=json.dumps(task),
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(170),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def load_oracle(directory: Path) -> PreTrainedModel:
    """The checkpoint in transformers, fp32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of a full forward per token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def hidden(model: PreTrainedModel, tokens: Sequence[int], layers: str = "last") -> torch.Tensor:
    """States of all tokens but the last, [T - 1, width], in the order of a RowLayout's names."""
    with torch.inference_mode():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    names = [-1 if name == "last" else int(name) for name in layers.split(",")]
    return torch.cat([states[name][0, :-1] for name in names], dim=-1)


def save_eagle3(
    directory: Path, hidden_size: int, vocab: int, draft_vocab: int, seed: int = 5
) -> None:
    """A random EAGLE-3 checkpoint in the published format: one wide layer, and a head over every
    third token.
    """
    torch.manual_seed(seed)
    heads, kv_heads = 4, 2
    dim, inner = hidden_size // heads, 2 * hidden_size
    shapes = {
        "fc.weight": (hidden_size, 3 * hidden_size),
        "midlayer.hidden_norm.weight": (hidden_size,),
        "midlayer.input_layernorm.weight": (hidden_size,),
        "midlayer.post_attention_layernorm.weight": (hidden_size,),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden_size),
        "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden_size),
        "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden_size),
        "midlayer.self_attn.o_proj.weight": (hidden_size, heads * dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden_size),
        "midlayer.mlp.up_proj.weight": (inner, hidden_size),
        "midlayer.mlp.down_proj.weight": (hidden_size, inner),
        "norm.weight": (hidden_size,),
        "lm_head.weight": (draft_vocab, hidden_size),
    }
    tensors = {
        name: torch.randn(shape) * 0.2 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    kept = torch.arange(draft_vocab) * (vocab // draft_vocab)
    tensors["d2t"] = kept - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))


def exact_pairs(
    model: PreTrainedModel, prompt: Sequence[int], temperature: float, top_k: int
) -> dict[tuple[int, int], float]:
    """Exact probability of every pair of first two tokens, float64."""

    def step(tokens: list[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double() / temperature
        top = logits.topk(top_k)
        return list(zip(top.indices.tolist(), torch.softmax(top.values, -1).tolist(), strict=True))

    ids = list(prompt)
    return {(a, b): p * q for a, p in step(ids) for b, q in step([*ids, a])}


def chi_square_p(counts: dict[tuple[int, int], int], exact: dict[tuple[int, int], float]) -> float:
    """p-value of Pearson's test; cells with expected counts below five are pooled. Raises
    AssertionError for an impossible pair.
    """
    from scipy.stats import chisquare  # installed with SGLang

    assert set(counts) <= set(exact)
    total = sum(counts.values())
    cells = sorted(exact.items(), key=lambda item: item[1])
    expected, observed, rest = [], [], [0.0, 0]
    for pair, probability in cells:
        if total * probability < 5:
            rest = [rest[0] + total * probability, rest[1] + counts.get(pair, 0)]
        else:
            expected.append(total * probability)
            observed.append(counts.get(pair, 0))
    if rest[0] > 0:
        expected[0] += rest[0]
        observed[0] += int(rest[1])
    return float(chisquare(observed, expected).pvalue)


def pair_counts(
    served: Served, prompt: Sequence[int], samples: int, **options: Any
) -> dict[tuple[int, int], int]:
    """Counts of each pair of first two tokens; every other request in the batch is greedy."""
    seeds = list(range(1000, 1000 + samples))
    numbers = served.send([prompt] * samples, seeds=seeds, max_tokens=3, capture=False, **options)
    company = served.send(
        [prompt] * (samples // 8), max_tokens=3, capture=False, arm=options.get("arm", "")
    )
    pairs = Counter(tuple(said(chunks)[:2]) for chunks in served.wait(numbers))
    assert len({tuple(said(chunks)) for chunks in served.wait(company)}) == 1
    return dict(pairs)
