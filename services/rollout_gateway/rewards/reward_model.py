"""Scores texts with a model, in a child of the rewards.

The model is a sequence-classification checkpoint. The scalar is its single logit; of two labels it
is the logit of the label "positive", else of index 1. Logits are not squashed. The process
downloads nothing, runs no code of the checkpoint and reads no pickle.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.rewards.child_program import Raised

ALLOWED = (
    "a directory with a sequence-classification checkpoint of one or two labels, a tokenizer and "
    "*.safetensors; pickled weights are not loaded, since they can run code"
)


class RewardModel:
    """Scores texts in batches, in float32 on the CPU."""

    def __init__(self, model: str, threads: int, max_tokens: int) -> None:
        """Texts are cut to `max_tokens`, or to the model's number of positions.

        Raises ConfigError.
        """
        torch.set_num_threads(threads)
        try:
            # Keep the end of a text, which has the answer, and the special tokens around it.
            self._tokenizer = AutoTokenizer.from_pretrained(
                model, local_files_only=True, truncation_side="left"
            )
            self._model, loaded = AutoModelForSequenceClassification.from_pretrained(
                model,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            message = f"gateway.rewards.model.model cannot be loaded: {error}"
            raise ConfigError(message, seen=model or "nothing", allowed=ALLOWED) from error

        if loaded["missing_keys"]:  # transformers would continue with random weights
            missing = ", ".join(sorted(loaded["missing_keys"])[:5])
            message = f"the reward model lacks weights: {missing}"
            raise ConfigError(message, seen=model, allowed=ALLOWED)

        self._model.eval()
        config = self._model.config
        self._index = scalar_index(config)
        if config.pad_token_id is None:
            config.pad_token_id = self._tokenizer.pad_token_id
        self._pad = config.pad_token_id
        positions = getattr(config, "max_position_embeddings", None) or max_tokens
        self._max_tokens = min(max_tokens, positions, self._tokenizer.model_max_length)

    def score_batch(self, episodes: tuple[Episode, ...]) -> tuple[float | Raised | None, ...]:
        """A logit for every readable text, else the reason."""
        read = [self._ids(episode) for episode in episodes]
        texts = [ids for ids in read if not isinstance(ids, Raised)]
        # Without a padding token transformers cannot find a text's end: run one text at a time.
        batches = [texts] if self._pad is not None else [[ids] for ids in texts]
        logits = iter([logit for batch in batches if batch for logit in self._logits(batch)])
        return tuple(one if isinstance(one, Raised) else next(logits) for one in read)

    def _ids(self, episode: Episode) -> list[int] | Raised:
        """Token ids of a conversation under the chat template if both exist, else of prompt and
        response as one text; or the reason why there are none.
        """
        text: Any = episode.task.prompt + episode.text
        cut: dict[str, Any] = {"truncation": True, "max_length": self._max_tokens}
        templated = bool(episode.messages and self._tokenizer.chat_template)
        try:
            if templated:
                messages = [message.shown(parsed=True) for message in episode.messages]
                text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=not templated, **cut)["input_ids"]
        except Exception as error:  # noqa: BLE001 - a template may raise anything; other texts are scored
            return Raised(f"{type(error).__name__}: {error}")
        return list(ids) or Raised("a text without tokens")

    @torch.inference_mode()
    def _logits(self, texts: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), self._pad if self._pad is not None else 0)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        return [float(logit) for logit in logits[:, self._index]]


def scalar_index(config: Any) -> int:
    """Index of the reward's logit. Raises ConfigError for more than two labels."""
    if config.num_labels == 1:
        return 0
    if config.num_labels == 2:
        labels = {label.lower(): int(index) for index, label in config.id2label.items()}
        return labels.get("positive", 1)
    raise ConfigError("a reward model with several labels", seen=config.num_labels, allowed=ALLOWED)
