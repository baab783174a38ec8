"""The front's sessions and the work of each call."""

import asyncio
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.services.tinker import bodies
from paceline.services.tinker.clients import Clients, TrainingClient
from paceline.services.tinker.config import TinkerConfig
from paceline.services.tinker.futures import BINARY, Future, Futures, Result
from paceline.services.tinker.samplers import Samplers

FULL = "paceline.full_training"
"""Key of a training client's user_metadata; with the value "true" all weights are trained."""
WEIGHTS, SAMPLERS = "weights", "sampler_weights"
Work = Callable[[TrainingClient], Awaitable[Result]]
_SCHEME, _OWNER = "tinker://", r"[A-Za-z0-9_-][A-Za-z0-9:._-]{0,127}"


@dataclass(frozen=True, slots=True)
class Sampler:
    """Weights to sample from."""

    path: str  # below the folder; "": the start policy
    model_path: str | None = None  # tinker://...


@dataclass(slots=True)
class Session:
    """A session of the SDK, with its training clients and samplers."""

    name: str
    clients: list[TrainingClient] = field(default_factory=list)
    samplers: dict[str, Sampler] = field(default_factory=dict)  # by name
    ends: asyncio.TimerHandle | None = None


class TinkerFront:
    """Sessions, training clients and samplers. Use on one event loop."""

    def __init__(
        self, config: TinkerConfig, futures: Futures, clients: Clients, samplers: Samplers
    ) -> None:
        self.config, self.futures = config, futures
        self._clients, self._samplers = clients, samplers
        self._sessions: dict[str, Session] = {}
        model = Path(config.model).absolute()
        self.model = str(model)
        self._names = {self.model, config.model, model.name, *config.model_names}
        for left_behind in (*config.folder.glob("*/resident"), *config.folder.glob("*/unnamed")):
            shutil.rmtree(left_behind)

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(self) -> dict[str, str]:
        """The description of a new session. Raises ResourceExhausted at the maximum."""
        if len(self._sessions) >= self.config.sessions:
            allowed = self.config.sessions
            raise errors.ResourceExhausted("too many live sessions", seen=allowed, allowed=allowed)
        session = Session(str(uuid.uuid4()))
        self._sessions[session.name] = session
        self.touch(session.name)
        note = "adapters of the head are not served: train_unembed has no effect"
        return {"session_id": session.name, "info_message": note, "type": "create_session"}

    def keep_session(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """session_heartbeat."""
        self.touch(fields.get("session_id"))
        return {"type": "session_heartbeat"}

    def touch(self, name: object) -> Session:
        """The session, which lives on. Raises NotFound if it is unknown or has ended."""
        session = self._sessions.get(str(name))
        if session is None:
            raise errors.NotFound("no such session; it may have ended", seen=name)
        if session.ends is not None:
            session.ends.cancel()
        loop = asyncio.get_running_loop()
        session.ends = loop.call_later(self.config.session_s, self.end_session, session.name)
        return session

    def end_session(self, name: str) -> None:
        """Ends a session. Its named states stay; its unnamed samplers and its clients go."""
        session = self._sessions.pop(name, None)
        for client in session.clients if session else ():
            self._clients.drop(client)
            for path in client.samplers:
                self._remove(path)
            self._remove(f"{client.folder}/resident")

    def _remove(self, path: str) -> None:
        """Deletes a directory in a thread, since large files take a second."""
        delete = partial(shutil.rmtree, self.config.folder / path, ignore_errors=True)
        asyncio.get_running_loop().run_in_executor(None, delete)

    def check_model(self, name: str | None) -> None:
        """Raises NotFound for another model than the served one."""
        if name is not None and name not in self._names:
            allowed = ", ".join(sorted(self._names))
            raise errors.NotFound("base_model is not served", seen=name, allowed=allowed)

    # --- training clients -------------------------------------------------------------------------

    def client(self, model_id: object) -> TrainingClient:
        """The training client. Raises NotFound."""
        found = self._clients.find(model_id) if isinstance(model_id, str) else None
        if found is None:
            raise errors.NotFound("the training client is unknown or has ended", seen=model_id)
        return found

    def submit(self, fields: Mapping[str, Any], size: int, work: Work) -> Future:
        """Queues a call by its model_id and seq_id. Its other fields are checked in its turn, so
        that a wrong call takes its place among the calls of its client.
        """
        if fields.get("model_id") is None and "model_seq_id" in fields:
            return self._add(fields, work)
        client, seq = self.client(fields.get("model_id")), fields.get("seq_id")
        if not isinstance(seq, int) or seq < 1:
            raise errors.InvalidInput("seq_id is wrong", seen=seq, allowed="1 or more")
        self.touch(client.session_id)
        return self._clients.submit(client, seq, size, lambda: work(client))

    def _add(self, fields: Mapping[str, Any], work: Work) -> Future:
        """Queues the first call of a new training client, which ends if that call fails."""
        session = self.touch(fields.get("session_id"))
        model_id = f"{session.name}:train:{fields['model_seq_id']}"
        client = self._clients.find(model_id) or TrainingClient(model_id, session.name)
        if client not in session.clients:
            self._clients.add(client)
            session.clients.append(client)

        async def first() -> Result:
            try:
                return await work(client)
            except errors.PacelineError:
                self._clients.drop(client)
                raise

        return self._clients.submit(client, 0, 0, first)

    async def create(self, client: TrainingClient, fields: Mapping[str, Any]) -> Result:
        """create_model, with adapters or with all weights trained."""
        body = bodies.ModelBody.read(fields)
        self.check_model(body.base_model)
        learner, lora = client.learner, body.lora_config
        if lora is not None and (body.user_metadata or {}).get(FULL) != "true":
            learner.rank, learner.targets[:] = lora.rank, lora.targets()
        seed = lora.seed if lora else None
        learner.seed = seed if seed is not None else uuid.uuid4().int >> 65
        await self._clients.create(client)
        return Result.of(model_id=client.model_id, type="create_model")

    async def load(self, client: TrainingClient, fields: Mapping[str, Any]) -> Result:
        """Replaces a client's weights by a saved state, with or without the optimiser's."""
        body = bodies.LoadBody.read(fields)
        self.check_model(body.base_model)
        path = self._path_of(body.path, WEIGHTS)
        await self._clients.create(client, path, optimizer=body.optimizer)
        return Result.of(path=body.path, model_id=client.model_id, type="load_weights")

    def info(self, model_id: object) -> dict[str, Any]:
        """The description of a training client."""
        client = self.client(model_id)
        return {
            "type": "get_info",
            "model_data": {"model_name": self.model, "tokenizer_id": self.model},
            "model_id": client.model_id,
            "model_name": self.model,
            "is_lora": client.learner.rank > 0,
            "lora_rank": client.learner.rank or None,
        }

    async def learn(self, client: TrainingClient, data: bytes) -> Result:
        """forward and forward_backward."""
        body = bodies.read_binary(data)
        answer = await self._clients.order(client, forward_backward=body)
        client.gradient |= not body.forward_only
        return Result(answer.output.SerializeToString(), BINARY)

    async def step(self, client: TrainingClient, fields: Mapping[str, Any]) -> Result:
        """optim_step. The turn of its client ends."""
        order = bodies.StepBody.read(fields).order()
        self._clients.end_turn()
        try:
            answer = await self._clients.order(client, optim_step=order)
        finally:  # a step that fails drops the gradient too
            client.gradient, client.changed = False, True
        return Result.of(metrics=dict(answer.figures))

    # --- saved states -----------------------------------------------------------------------------

    async def save(self, client: TrainingClient, fields: Mapping[str, Any]) -> Result:
        """save_weights."""
        return await self._save(client, bodies.SaveBody.read(fields), WEIGHTS)

    async def save_sampler(self, client: TrainingClient, fields: Mapping[str, Any]) -> Result:
        """save_weights_for_sampler, with a name, or as a sampler at once."""
        body = bodies.SaveBody.read(fields)
        if body.path is not None:
            return await self._save(client, body, SAMPLERS)
        path = f"{client.folder}/unnamed/{body.seq_id}"
        await self._clients.save(client, path, weights_only=True)
        client.samplers.append(path)
        while len(client.samplers) > self.config.kept_samplers:
            self._remove(client.samplers.popleft())
        name = self._add_sampler(client.session_id, body.sampling_session_seq_id, path, None)
        return Result.of(sampling_session_id=name)

    async def _save(self, client: TrainingClient, body: bodies.SaveBody, kind: str) -> Result:
        if body.path is None:
            raise errors.InvalidInput("path is missing", allowed=bodies.NAME)
        path = f"{client.folder}/{kind}/{body.path}"
        if (self.config.folder / path).exists() and not body.overwrite and kind == WEIGHTS:
            message = "a state of that name is saved"
            raise errors.FailedPrecondition(message, seen=body.path, allowed="overwrite=True")
        await self._clients.save(client, path, weights_only=kind == SAMPLERS)
        return Result.of(path=f"{_SCHEME}{client.model_id}/{kind}/{body.path}")

    def _path_of(self, uri: str, kind: str) -> str:
        """Directory of a saved state below the folder. Raises NotFound."""
        found = re.fullmatch(f"{_SCHEME}({_OWNER}/{kind}/{bodies.NAME})", uri)
        path = found[1].replace(":", "-") if found else ""
        if not path or not (self.config.folder / path).is_dir():
            allowed = f"{_SCHEME}MODEL_ID/{kind}/NAME of a saved state"
            raise errors.NotFound("nothing is saved there", seen=uri[:200], allowed=allowed)
        return path

    # --- samplers ---------------------------------------------------------------------------------

    def open_sampler(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """A sampler of saved weights or of the start policy."""
        body = bodies.SamplerBody.read(fields)
        self.check_model(body.base_model)
        path = self._path_of(body.model_path, SAMPLERS) if body.model_path else ""
        number = body.sampling_session_seq_id
        name = self._add_sampler(body.session_id, number, path, body.model_path)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def _add_sampler(self, session_id: str, number: int | None, path: str, uri: str | None) -> str:
        name = f"{session_id}:sample:{number}"
        self.touch(session_id).samplers[name] = Sampler(path, uri)
        return name

    def sampler_info(self, name: str) -> dict[str, str | None]:
        """The description of a sampler."""
        found = self._sampler(name)
        return {"sampler_id": name, "base_model": self.model, "model_path": found.model_path}

    def _sampler(self, name: str) -> Sampler:
        """The sampler, whose session lives on. Raises NotFound."""
        found = self.touch(name.partition(":")[0]).samplers.get(name)
        if found is None:
            raise errors.NotFound("no such sampler in its session", seen=name)
        return found

    def sample(self, fields: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Starts a sample; returns the promise of its future, with the names of its sequences."""
        body = bodies.SampleBody.read(fields)
        sampler = self._sampler(body.sampling_session_id)
        name = f"{body.sampling_session_id}:{body.seq_id}"
        names = [f"{name}:{number}" for number in range(body.num_samples)]
        future = self.futures.find(name)
        if future is None:
            future = self.futures.open(name, size)
            self.futures.start(future, self._sample(sampler.path, body, name))
        return future.promise(sample_sequence_ids=names)

    async def _sample(self, path: str, body: bodies.SampleBody, name: str) -> Result:
        if path and not (self.config.folder / path).is_dir():
            allowed = f"{self.config.kept_samplers} unnamed samplers of a client; others by name"
            raise errors.NotFound("the weights are gone", seen=name, allowed=allowed)
        return await self._samplers.sample(path, body, name)
