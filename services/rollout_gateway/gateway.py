"""Joins the parts of one gateway: requests in, tokens out, finished branches to the ledger."""

import itertools
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from paceline.arm_names import OFF
from paceline.errors import DeadlineExceeded, InvalidInput, ResourceExhausted, Unavailable
from paceline.local import forking, user_directory
from paceline.models.reading import check_vocabulary, end_tokens, read_object
from paceline.rpc.progress import Activity
from paceline.services.rollout_gateway import background, engines, metrics, sandbox
from paceline.services.rollout_gateway.calls import planner, queue
from paceline.services.rollout_gateway.calls.call import Plan
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import UNSEEDED
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.environments import table, toolbox
from paceline.services.rollout_gateway.features import FeaturePublisher, Origin
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.services.rollout_gateway.sessions import agents, names, outbox, tree
from paceline.services.rollout_gateway.workers import router, weights
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.streams import connect
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb
from paceline.weights import Spool

STOP_GRACE_S = 10.0
_SHARES = 10_000
"""Resolution of features.share."""

log = get_logger(__name__)


class Gateway:
    """All parts of one gateway on one event loop: start, use, stop."""

    def __init__(self, config: GatewayConfig, forker: forking.Forker | None = None) -> None:
        """`forker`: of the workers."""
        self.config = config
        addresses = config.all_addresses
        self.names = names.GatewayNames(config.number, addresses.gateways, addresses.gateways_http)
        self.model = config.model_dir.resolve().name
        self._ends = end_tokens(config.model_dir)
        tokenizer = Path(config.tokenizer) if config.tokenizer else config.model_dir
        self.codec = TextCodec(tokenizer, end_ids=[one.token_id for one in self._ends])
        model = read_object(config.model_dir / "config.json")
        check_vocabulary(self.codec.files, model.get("vocab_size"))
        self._temporary = ExitStack()
        spool = config.spool or self._temporary.enter_context(
            tempfile.TemporaryDirectory(prefix="spool-", dir=user_directory.process_directory())
        )
        self.spool = _open_spool(Path(spool), config)
        self.state = config.spool
        """Directory of the state kept over a restart; None: no state is kept."""
        kept, urls = bool(config.trajectories), config.redis
        durable = connect(urls.durable_url) if kept else None
        features = connect(urls.features) if kept else None
        self._clients = [client for client in (durable, features) if client is not None]
        self.outbox = outbox.Outbox(durable, config.max_unsent_bytes)
        self.first_worker = config.number * config.worker_count
        self.publisher = FeaturePublisher(
            features, config.features, lambda version: self.weights.lm_head_hash(version)
        )
        on_rows, on_discard = self.publisher.add_rows, self.publisher.discard
        self.router = router.Router(config, on_rows, on_discard, forker)
        self.weights = weights.WorkerWeights(self.router, self.spool, config.canary)
        self.agents = agents.Agents(config, self.outbox, durable, self.names)
        # One request more than an engine's batch fills a free place at once, so that no round runs
        # with too few requests.
        room = config.worker_count * (config.engine.max_batch + 1)
        self.queue = queue.FairQueue(config.queue, room)
        self.sandbox = sandbox.Sandbox(config.rewards.sandbox)
        self.rewards = RewardRules(config.rewards, self.sandbox)
        self.toolbox = toolbox.Toolbox(self.sandbox, config.tools, config.tool_servers)
        own, users = config.environments, config.interactions
        self.equipment = table.Equipment(self.sandbox, own, self.toolbox, users)
        self.aside = background.LargeRequests()
        sessions, ready = self.agents.sessions, lambda: self.router.ready
        self.planner = planner.Planner(config, self.codec, sessions, ready, self.aside)
        self.activity = Activity("gateway")
        self.samples_left = 0  # of RunTasks calls
        self.http_address = ""  # host:port for clients on this machine, once HTTP is served
        self._request_ids = itertools.count(1)
        self.quarantined = weights.Quarantined(self.router)
        self.router.on_ready = self._equip
        self.router.orders = lambda: (self.quarantined.paths, self.weights.versions)
        self.lending = self.router.lending
        self.lending.on_return = self.weights.take_memory

    async def start(self) -> None:
        """Start workers and senders; returns when every worker serves.

        Raises ConfigError when code cannot be isolated as configured. The isolation "auto" is first
        checked when code runs.
        """
        if self._ends:
            log.info("end tokens", tokens=[str(one) for one in self._ends])
        else:
            message = "no file of the model names an end token: answers end at max_tokens"
            log.warning(message, model=str(self.config.model_dir))
        if self.config.rewards.sandbox.isolation != "auto":
            await self.sandbox.layers()
        self.lending.restore_leases()
        await self.router.start()
        self.outbox.start()
        self.publisher.start(wire.rows_from(self.router.ready))
        await self.agents.start()

    async def stop(self) -> None:
        """End workers, send waiting data for a few seconds, close connections."""
        self.aside.stop()
        await self.router.stop()
        await self.rewards.stop()
        await self.toolbox.stop()
        await self.agents.stop()
        await self.outbox.stop(STOP_GRACE_S)
        await self.agents.close()
        await self.publisher.stop()
        for client in self._clients:
            await client.aclose()
        self._temporary.close()

    def submit(self, plan: Plan, *, stream: bool) -> Generation:
        """Queue one request."""
        number, sampling = next(self._request_ids), plan.sampling
        if sampling.seed == UNSEEDED:
            sampling = replace(sampling, seed=secrets.randbits(63))
        asked = Request(number, plan.prompt, sampling, stream, plan.capture, plan.forced_arm)
        request = wire.request_to(asked)
        if plan.capture:
            self.publisher.expect(number)
        metrics.REQUESTS.record()
        prefer = plan.session.worker_index if plan.session is not None else None
        slow = engines.find_engine(self.config.engine.kind).starts_slowly
        rerun = plan.queue_key is None or not slow
        return self.router.submit(request, worker=plan.worker, prefer=prefer, rerun=rerun)

    def abort(self, generation: Generation) -> None:
        """Free a request's place in the engine and its hidden rows; none of its tokens are
        recorded.
        """
        self.router.abort(generation)
        self.publisher.forget(generation.request.request_id)

    def place(self, key: str) -> AbstractAsyncContextManager[object]:
        """Wait for a place in the engine. Raises ResourceExhausted when too many wait."""
        return self.queue.place(key)

    def recorded(self, plan: Plan, generation: Generation, turn: tree.Turn) -> None:
        """Handle the end of a turn: index its session by the turn, and publish its hidden rows."""
        assert plan.session is not None
        self.agents.sessions.record_turn(plan.session, turn)
        if plan.capture:
            request, about = generation.request, plan.session.assignment
            prompt, session_id = request.prompt_token_ids, plan.session.session_id
            step = self.agents.open_step if about.open_group else about.step
            sizes = request.sampling.temperature, len(prompt)
            tokens = [*prompt, *generation.whole.token_ids]
            origin = Origin(about.run_id, step, session_id, about.group_id, *sizes, tokens)
            self.publisher.publish(request.request_id, origin)

    def admit(self) -> None:
        """Raises ResourceExhausted while finished work above the limit waits for Redis or for a
        step.
        """
        try:
            self.outbox.admit()
            self.agents.groups.admit()
        except ResourceExhausted:
            metrics.REQUESTS_REFUSED.record()
            raise

    def captures(self, seed: int) -> bool:
        """Whether to capture the rows of the request with this seed: the same requests in every run
        with the same run seed.
        """
        return seed % _SHARES < self.config.features.share * _SHARES

    async def learn_arms(self, arms: Sequence[pb.ArmStats]) -> None:
        """Send statistics of arms to the bandits of all workers."""
        command = pb.WorkerCommand(learn_arms=pb.LearnArms(arms=arms))
        for answer in await self.router.ask_all(command):
            if isinstance(answer, Unavailable | DeadlineExceeded):  # learned at the next rollouts
                log.warning("a worker did not learn the arms", error=str(answer))
            elif isinstance(answer, BaseException):
                raise answer

    async def _equip(self, process: WorkerProcess) -> None:
        """Prepare a worker before its first request. If the drafter of the forced arm rests, the
        worker drafts nothing, like the other workers.
        """
        await self.weights.load_committed(process)
        await self.quarantined.send_paths(process)
        try:
            await process.ask(_speculation(self.config.speculation.forced_arm))
        except InvalidInput as error:
            if not self.weights.versions.drafter:
                raise
            log.warning("the forced arm's drafter rests", worker=process.index, error=str(error))
            await process.ask(_speculation(OFF))


def _speculation(arm: str) -> pb.WorkerCommand:
    return pb.WorkerCommand(set_speculation=pb.SetSpeculation(forced_arm=arm))


def _open_spool(directory: Path, config: GatewayConfig) -> Spool:
    """The spool. Before the first commit it serves the configured policy, drafter and profile.
    Raises ConfigError for an invalid profile.
    """
    initial = {int(pb.WEIGHT_TARGET_POLICY): config.model_dir}
    drafter = Path(config.drafter)
    if drafter.is_dir() and (drafter / "config.json").is_file():
        initial[int(pb.WEIGHT_TARGET_DRAFTER)] = drafter
    return Spool(directory, initial=initial, profile=config.engine.profile)
