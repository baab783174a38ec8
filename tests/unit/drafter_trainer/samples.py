"""A toy policy that computes its next state from state and token, and the rows that an engine would
capture from it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.rows.sample import FeatureSample, PolicyHead, sample_from
from paceline.speculators.net import DraftNet
from paceline.speculators.packed import PackedRow
from paceline.streams import FeatureBatch
from paceline.tensors import from_numpy

VOCABULARY, HIDDEN = 23, 16
TARGET = ModelConfig(
    family="llama",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
)
HASH = "00112233445566ff"
PROMPT = 3


@dataclass(frozen=True)
class ToyPolicy:
    """h_{t+1} = tanh(A h_t + 2 E[token t+1]); token t+1 = argmax(W h_t)."""

    mix: Tensor  # [H, H] A
    embed: Tensor  # [V, H] E
    head: Tensor  # [V, H] W

    def step(self, hidden: Tensor, token: Tensor) -> Tensor:
        """States one token on; hidden [..., H], token [...]."""
        return torch.tanh(hidden @ self.mix.T + 2 * self.embed[token])

    def rows(self, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens [length] and the states [length - 1, H] at all but the last."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (PROMPT,), generator=generator).tolist()
        hidden = [torch.tanh(torch.randn(HIDDEN, generator=generator))]
        while len(hidden) < length - 1:
            if len(tokens) <= len(hidden):
                tokens.append(int((self.head @ hidden[-1]).argmax()))
            hidden.append(self.step(hidden[-1], torch.tensor(tokens[len(hidden)])))
        while len(tokens) < length:
            tokens.append(int((self.head @ hidden[len(tokens) - 1]).argmax()))
        return torch.tensor(tokens[:length]), torch.stack(hidden)

    def policy_head(self, name: str = HASH, version: int = 0) -> PolicyHead:
        """Return the parameters that the drafter shares with this policy."""
        return PolicyHead(name, version, self.embed, self.head)


def toy_policy() -> ToyPolicy:
    """Return a toy policy with fixed weights."""
    generator = torch.Generator().manual_seed(1)
    return ToyPolicy(
        mix=torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.3,
        embed=torch.randn(VOCABULARY, HIDDEN, generator=generator),
        head=torch.randn(VOCABULARY, HIDDEN, generator=generator),
    )


def batch(
    length: int, seed: int, *, session: str = "", version: int = 0, head: str = HASH
) -> FeatureBatch:
    """The toy policy's rows of one request as a stream entry."""
    tokens, hidden = toy_policy().rows(length, seed)
    rows = length - 1
    return FeatureBatch(
        run_id="r",
        step=0,
        session_id=session or f"s{seed}",
        policy_version=version,
        lm_head_hash=head,
        hidden=from_numpy("hidden", hidden.numpy()),
        token_ids=tokens.numpy().astype(np.int32),
        positions=np.arange(rows, dtype=np.int32),
        mask=(np.arange(rows) >= PROMPT).astype(np.uint8),
        versions=np.full(rows, version, dtype=np.int64),
        temperature=0.0,
    )


def sample(
    length: int, seed: int, *, session: str = "", version: int = 0, head: str = HASH
) -> FeatureSample:
    """The same as the buffer keeps it."""
    return sample_from(batch(length, seed, session=session, version=version, head=head), TARGET)


def sessions(count: int, *, heldout: bool, every: int) -> list[str]:
    """Names that the buffer's rule puts on that side of the split."""
    names = (f"n{i}" for i in range(100 * count))
    return [name for name in names if (zlib.crc32(name.encode()) % every == 0) is heldout][:count]


def over_tokens(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] by token, from logits [..., Vd] of the tokens int64 [Vd]; -inf for all other
    tokens.
    """
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., token_ids] = logits
    return full


def chain_logits(net: DraftNet, row: PackedRow, steps: int) -> list[Tensor]:
    """Logits [T, V] of drafts 1 .. steps from every position, -inf for tokens that the network
    cannot draft; see DraftNet.chain_states.
    """
    chain: dict[int, list[Tensor]] = {}
    for step, _, states in net.chain_states(row, steps):
        chain.setdefault(step, []).append(net.draft_logits(step, states))
    found = [torch.cat(parts) for parts in chain.values()]
    ids = net.token_ids
    return found if ids is None else [over_tokens(one, ids, len(net.head)) for one in found]
