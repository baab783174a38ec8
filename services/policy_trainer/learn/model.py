"""Loads the policy and its critic, and runs them over packed rows. The start policy is loaded unit
by unit, so no rank ever holds all of it.

Shape letters: R rows, W row width, M trained tokens, U distinct trained tokens, D hidden size, V
vocabulary, C rows of a chunk of the language-model head.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError, DataLoss, WeightsError
from paceline.models import loading, products
from paceline.services.policy_trainer.batches.batch import MicroBatch
from paceline.services.policy_trainer.config import rows_of_head

KERNELS = {"sdpa": "sdpa", "flex": "flex_attention"}
"""transformers' names for the choices of `policy_trainer.attention`."""


def causal_lm_on_meta(directory: Path, attention: str = "sdpa") -> Any:
    """The transformers module of a directory in fp32, with parameters on meta.

    Raises ConfigError for a directory without a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        message = f"no model can be loaded from {directory}: {error}"
        raise ConfigError(message, seen=directory) from error
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=KERNELS[attention]
        )
    # The only buffers of these models. They are computed, not stored in a file.
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config=config)
    products.use_linear(lm)
    return lm


def check_attention(attention: str, device: str) -> None:
    """Raises ConfigError for a kernel that cannot train on the device."""
    if attention != "sdpa" and device != "cuda":
        seen = f"policy_trainer.attention={attention}"
        raise ConfigError(f"this attention does not train on {device}", seen=seen, allowed="sdpa")


class StartWeights:
    """The safetensors of a Hugging Face directory, read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidInput for a directory without weights, DataLoss for a damaged file."""
        self._directory = directory
        self._files: dict[str, Path] = {}
        for path in loading.weight_files(directory):
            try:
                with safe_open(path, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), path)
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

    def fill(self, unit: nn.Module, names: Mapping[nn.Parameter, str], device: str) -> None:
        """Allocates parameters of the unit that have no memory yet, on the device, with the file's
        numbers. Tied parameters stay tied.

        `names`: their names in the files. Raises WeightsError for a tensor that is missing or has
        another shape.
        """
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for owner in unit.modules():
            for key, parameter in list(
                owner.named_parameters(recurse=False, remove_duplicate=False)
            ):
                if not parameter.is_meta:
                    continue
                if parameter not in filled:
                    whole = self.read(names[parameter], parameter.shape).to(device)
                    filled[parameter] = nn.Parameter(whole, parameter.requires_grad)
                owner.register_parameter(key, filled[parameter])

    def dtype(self, name: str) -> str:
        """torch's name for the stored dtype of a tensor; empty if it is absent."""
        if name not in self._files:
            return ""
        with safe_open(self._files[name], framework="pt") as opened:
            first: Tensor = opened.get_slice(name)[:1]
        return str(first.dtype).removeprefix("torch.")

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """One tensor in fp32. Raises as `fill` does."""
        path = self._files.get(name)
        if path is None:
            message = f"tensor {name} is missing"
            raise WeightsError(message, seen=self._directory, allowed=f"{tuple(shape)}")
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        if tensor.shape != shape:
            message = f"tensor {name} has a wrong shape"
            raise WeightsError(message, seen=tuple(tensor.shape), allowed=tuple(shape))
        return tensor.to(torch.float32)


def _unreadable(path: Path, error: Exception) -> DataLoss:
    return DataLoss(f"cannot read {path}: {error}", allowed="a whole safetensors file")


Head = Callable[[Float[Tensor, "C D"]], Float[Tensor, "C V"]]


def head_logprobs(
    hidden: Float[Tensor, "M D"],
    head: Head,
    targets: Int[Tensor, " M"],
    *,
    chunk_rows: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-prob of each target and entropy in nats, in fp32. The entropy has a gradient only with
    `entropy_gradient`.

    Memory holds the logits of one chunk at most. With several chunks, they are computed again in
    the backward (Chen et al. 2016, arXiv 1604.06174).
    """

    def of_chunk(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _Scores.apply(head(rows).float(), wanted, entropy_gradient)
        return logprobs, entropy if entropy_gradient else entropy.detach()

    chunks = list(zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True))
    again = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_chunk, *one, use_reentrant=False) if again else of_chunk(*one)
        for one in chunks
    ]
    scores, entropies = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(entropies)


class _Scores(torch.autograd.Function):
    """Log-prob and entropy with an explicit gradient, in half as many passes over tensors of the
    logits' size as autograd needs.

    With p the distribution, H its entropy and y the target: d log p_y / dz = 1_y - p, and dH / dz =
    -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        probs = logprobs.exp()
        entropy = torch.einsum("cv,cv->c", probs, logprobs).neg()
        kept = (logprobs, entropy) if entropy_gradient else ()
        ctx.save_for_backward(targets, probs, *kept)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        targets, probs, *kept = ctx.saved_tensors
        if kept:
            logprobs, entropy = kept
            whole = (logprobs + entropy[:, None]).mul_(-of_entropy[:, None])
            whole.sub_(of_logprob[:, None]).mul_(probs)
        else:
            whole = probs * -of_logprob[:, None]
        return whole.scatter_add_(-1, targets[:, None], of_logprob[:, None]), None, None


MASKED = 2.5
"""Cost of a multiplication in masked attention, relative to a multiplication in a matrix product.
Measured on a CPU with the demo's policy: a core does 2.6 times fewer per second.
"""


class PolicyModel(nn.Module):
    """A transformers causal language model with log-probs of the trained positions as its output.

    A trained token shared by several trajectories is predicted once.
    """

    def __init__(self, lm: Any, chunk_rows: int = 0) -> None:
        """`chunk_rows`: policy_trainer.head_rows."""
        super().__init__()
        self.lm = lm
        self._chunk_rows = chunk_rows or rows_of_head(lm.config.vocab_size)

    def forward(
        self, micro: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """(log_softmax(logits / temperature)[target], entropy in nats), in fp32.

        The head has no bias, so hidden rows are divided by the temperature instead of logits.
        """
        hidden = hidden_rows(self.lm.model, micro)
        rows = hidden / micro.temperatures[:, None]
        logprobs, entropy = head_logprobs(
            rows.to(hidden.dtype),
            self.lm.lm_head,
            micro.targets,
            chunk_rows=self._chunk_rows,
            entropy_gradient=entropy_gradient,
        )
        return logprobs[micro.predictions], entropy[micro.predictions]

    @property
    def config(self) -> Any:
        """The decoder's config, as in transformers."""
        return self.lm.config

    def layers(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.lm.model.layers)

    def names(self) -> dict[nn.Parameter, str]:
        """Parameters by their names in a Hugging Face directory; tied parameters appear once.
        Adapters have peft's names.
        """
        return {
            one: name.removeprefix("lm.").replace(".base_layer.", ".")
            for name, one in self.named_parameters()
        }


class ValueModel(nn.Module):
    """A decoder and one number per token, which is 0 everywhere before training."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Float[Tensor, " M"]:
        """Value before each trained token is drawn, in fp32."""
        value: Tensor = self.head(hidden_rows(self.decoder, micro))
        value = value.float().sum(-1)  # a sum over one element; FSDP2 does not hook views
        return value[micro.predictions]

    @property
    def config(self) -> Any:
        """The decoder's config, as in transformers."""
        return self.decoder.config

    def layers(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.decoder.layers)

    def names(self) -> dict[nn.Parameter, str]:
        """Parameters of the decoder by their names in a Hugging Face directory."""
        return {one: f"model.{name}" for name, one in self.decoder.named_parameters()}


def hidden_rows(decoder: Any, micro: MicroBatch) -> Float[Tensor, "U D"]:
    """Last hidden states at the positions that predict a trained token."""
    mask = None
    if micro.subtree_ends is not None:
        blocks = decoder.config._attn_implementation == KERNELS["flex"]
        mask = tree_mask(micro.subtree_ends, blocks=blocks)
    hidden: Tensor = decoder(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    return hidden.flatten(0, 1)[micro.predict_at]


def pair_cost(model: PolicyModel | ValueModel) -> float:
    """Cost of one token's attention to another, relative to all matrix products of a token.

    Counted in multiplications: scores and weighted sum, against the weights of the layers.
    """
    config, layers = model.config, model.layers()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    weights = sum(one.numel() for layer in layers for one in layer.parameters())
    return MASKED * 2 * width * len(layers) / weights


def tree_mask(subtree_ends: Int[Tensor, "R W"], *, blocks: bool) -> Any:
    """Mask of the tokens that each token of a row attends to, bool [R, 1, W, W], or flex's blocks.

    Transformers accepts either as it is.
    """
    rows, width = subtree_ends.shape

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_ends[row, key])

    if blocks:
        return create_block_mask(attends, rows, None, width, width, subtree_ends.device)
    at = torch.arange(width, device=subtree_ends.device)
    return (at <= at[:, None]) & (at[:, None] < subtree_ends[:, None, None, :])


def policy_on_meta(
    directory: Path,
    *,
    recompute: bool = False,
    chunk_rows: int = 0,
    attention: str = "sdpa",
) -> PolicyModel:
    """The model of a Hugging Face directory in fp32, on meta.

    `recompute`: keep only the input of each decoder layer's forward (Chen et al. 2016, arXiv
    1604.06174). `chunk_rows`: as in PolicyModel. Raises as causal_lm_on_meta.
    """
    lm = causal_lm_on_meta(directory, attention)
    lm.config.use_cache = False
    if recompute:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()  # transformers recomputes in training mode only; there is no dropout
    return PolicyModel(lm, chunk_rows)
