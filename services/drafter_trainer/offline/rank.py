"""Runs one rank of an offline run as its own process: set-up and signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, read_config
from paceline.models.loading import DTYPES
from paceline.ranks.group import RankLink
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.offline.config import OfflineConfig
from paceline.services.drafter_trainer.offline.data import Example, ModelText, read_samples
from paceline.services.drafter_trainer.offline.generation import (
    answer_prompts,
    answers_file,
    write_answers,
)
from paceline.services.drafter_trainer.offline.target import TargetModel
from paceline.services.drafter_trainer.offline.trainer import OfflineTrainer, Tell, usable
from paceline.speculators.loading import trained_net
from paceline.speculators.net import DraftNet
from paceline.training.hugging_face import load_causal_lm
from paceline.training.process import COLLECTIVE_S, join_ranks

FAREWELL_S = 10.0


def train(config: OfflineConfig, tell: Tell, stopping: Callable[[], bool]) -> bool:
    """Trains the whole run on this rank; returns whether it reached its end. Collective: the ranks
    need a gloo process group.

    Raises ConfigError, InvalidInput, WeightsError or DataLoss for unusable settings or data.
    """
    target = read_config(config.model)
    net = make_net(config, target)  # before the data, to reject a wrong option at once
    encoder = cache(lambda: ModelText(config.model, target.eos_token_ids))
    samples = read_samples(config.data, encoder, target.vocab_size, prompts=config.regenerate)
    config.out.mkdir(parents=True, exist_ok=True)
    lm = load_causal_lm(config.model, DTYPES[config.dtype])
    lm.generation_config.eos_token_id = list(target.eos_token_ids) or None
    limit = min(config.row_tokens, target.max_position_embeddings)
    if config.regenerate:
        samples = _answers(lm, samples, config, target, limit, tell)
    samples, counted = usable(samples, limit)
    tell({"kind": "data", **counted})
    if config.start is None:
        _choose_tokens(net, samples, target)
    members = on_cpu(dist.get_world_size())
    base = TargetModel(lm, config.model, net.capture, members.mesh)
    return OfflineTrainer(config, net, base, samples, tell, members).run(stopping)


def make_net(config: OfflineConfig, target: ModelConfig) -> DraftNet:
    """The network to train: fresh, or from the start checkpoint. Raises ConfigError, InvalidInput
    or WeightsError.
    """
    kind = trained_net(config.speculator)
    options = kind.read_options(config.options)
    if config.start is not None:
        return kind.read(config.start, target, options)
    return kind.fresh(target, options, config.seed)


def _choose_tokens(net: DraftNet, samples: list[Example], target: ModelConfig) -> None:
    """Passes the count of each drafting target to a fresh network with a reduced vocabulary."""
    choose = getattr(net, "choose_tokens", None)
    if choose is not None:
        drafted = np.concatenate([sample.token_ids[2:][sample.mask[2:]] for sample in samples])
        choose(torch.from_numpy(np.bincount(drafted, minlength=target.vocab_size)))


def _answers(
    lm: Any,
    prompts: list[Example],
    config: OfflineConfig,
    target: ModelConfig,
    limit: int,
    tell: Tell,
) -> list[Example]:
    """The model's own answers, drawn once per output directory."""
    path = answers_file(config, prompts)
    drawn = path.exists()
    dist.barrier()  # all ranks have checked for the file
    if drawn:
        return read_samples(path, cache(lambda: ModelText(config.model, ())), target.vocab_size)
    samples = answer_prompts(
        lm,
        prompts,
        config,
        limit,
        lambda done, whole: tell({"kind": "answers", "done": done, "of": whole}),
    )
    if dist.get_rank() == 0:
        write_answers(path, samples)
    return samples


def main() -> None:
    """Reads the settings from the environment, where the parent put them, and trains."""
    link = RankLink.from_environment()
    config = link.config(OfflineConfig)
    stop = [False]
    signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
    join_ranks("cpu", COLLECTIVE_S, threads=config.threads_per_rank, seed=config.seed)

    def tell(message: dict[str, Any]) -> None:
        if link.rank == 0:
            link.send(json.dumps(message).encode())

    link.ready()
    try:
        tell({"kind": "done", "whole": train(config, tell, lambda: stop[0])})
    except PacelineError as error:
        tell({"kind": "error", "text": str(error)})

    link.receive(FAREWELL_S)  # waits until the parent has read the last message
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
