"""Ranks of a process group, each a real process, forked from a process that has imported torch
once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.training import STORE_VARIABLE

_IMPORTED = (
    "paceline.services.drafter_trainer.learn.learner",
    "paceline.services.policy_trainer.learn.learner",
    "transformers.models.llama.modeling_llama",
)


def run_ranks(main: Callable[..., None], world_size: int, directory: Path, *given: Any) -> None:
    """Runs `main(*given)` in each of `world_size` processes, which find each other by their
    environment, through an address or a file in `directory`. `main` is defined in a module that the
    tests import by its name. Fails with the error that a rank raised.
    """
    meeting = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        STORE_VARIABLE: str(directory / f"{main.__module__}.{free_port()}.store"),
    }
    context, told, ranks = _forking(), [], []
    for rank in range(world_size):
        reading, writing = context.Pipe(duplex=False)
        environment = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_rank, args=(writing, environment, main, given)))
        ranks[-1].start()
        writing.close()
        told.append(reading)
    try:
        _all_end_well(told)
    finally:
        for one in ranks:
            one.kill()
            one.join()


def _all_end_well(told: list[Connection]) -> None:
    waiting = list(told)
    while waiting:
        ended = wait(waiting, patient(90))
        assert ended, f"{len(waiting)} of {len(told)} ranks have not ended"
        for one in ended:
            assert isinstance(one, Connection)
            waiting.remove(one)
            try:
                wrong = one.recv()
            except EOFError:
                wrong = "it was killed"
            assert not wrong, f"rank {told.index(one)}: {wrong}"


@cache
def _forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def _rank(
    telling: Connection, environment: dict[str, str], main: Callable[..., None], given: Any
) -> None:
    os.environ.update(environment)
    gc.freeze()  # a collection would scan all imported modules
    try:
        main(*given)
    except BaseException:
        telling.send(traceback.format_exc())
        raise
    telling.send("")
