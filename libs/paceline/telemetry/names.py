"""The names of all spans and their attributes, in one place.

A thing with an OpenTelemetry name has that name: `gen_ai.*` of its conventions for generative AI,
`http.*`, `rpc.*`, `error.*`. Attributes of reinforcement learning are `rl.*`. A span's name is the
kind of work and never holds a value: the report and `paceline why` find spans by name.
"""

# ---- spans of the coordinator and of calls

STEP = "step"
HTTP_REQUEST = "http.request"
REWARD_REMOTE = "reward.remote"


def rpc_span(service: str, method: str) -> str:
    """Name of a gRPC call's span, at both ends: "RolloutService.RunTasks"."""
    return f"{service.rpartition('.')[2]}.{method}"


# ---- spans of the gateway

RUN_TASKS = "rollout.run_tasks"
SESSION = "rollout.session"
AGENT_SESSION = "agent.session"
TRAJECTORY_APPEND = "trajectory.append"
FEATURES_PUBLISH = "features.publish"
ENGINE_REQUEST = "engine.request"
ENGINE_BUSY = "engine.busy"
WORKERS_RELEASE = "workers.release"
WORKERS_RESUME = "workers.resume"
WEIGHTS_PREPARE = "weights.prepare"
WEIGHTS_COMMIT = "weights.commit"
WEIGHTS_CANARY = "weights.canary"


def engine_stage(stage: str) -> str:
    """Name of a request's stage inside an engine: "engine.queue", "engine.prefill",
    "engine.decode".
    """
    return f"engine.{stage}"


# ---- spans of the trainers

TRAJECTORY_READ = "trajectory.read"
BATCH_WAIT = "policy.batch_wait"
OPTIMIZER_STEP = "policy.optimizer_step"
POLICY_PUBLISH = "policy.publish"
POLICY_CHECKPOINT = "policy.checkpoint"
FEATURES_READ = "features.read"
DRAFTER_ACTIVATE = "drafter.activate"
DRAFTER_MICRO_STEP = "drafter.micro_step"
DRAFTER_GATE = "drafter.gate"


def policy_part(part: str) -> str:
    """Name of a part of an optimiser step: "policy.forward_backward"."""
    return f"policy.{part}"


# ---- attributes of OpenTelemetry's conventions

ERROR_TYPE = "error.type"
ERROR_MESSAGE = "error.message"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.grpc.status_code"
SERVER_ADDRESS = "server.address"
MESSAGING_SYSTEM = "messaging.system"

GEN_AI_OPERATION = "gen_ai.operation.name"  # chat, text_completion
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_CONVERSATION = "gen_ai.conversation.id"  # the session's id
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_TOP_P = "gen_ai.request.top_p"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

PROVIDER = "paceline"
"""Value of `GEN_AI_PROVIDER`."""
CHAT, TEXT_COMPLETION = "chat", "text_completion"
"""Values of `GEN_AI_OPERATION`."""

# ---- attributes of reinforcement learning: the owner of the work

RUN = "rl.run"
RL_STEP = "rl.step"
EPOCH = "rl.lease.epoch"
SLOTS = "rl.lease.slots"
TASK = "rl.task"
SESSION_ID = "rl.session"
SESSION_STATE = "rl.session.state"
SESSION_TURNS = "rl.session.turns"
BRANCH = "rl.branch"
REWARD = "rl.reward"
WORKER = "rl.worker"
WORKERS = "rl.workers"
SET_SEQ = "rl.version.seq"
POLICY_VERSION = "rl.version.policy"
DRAFTER_VERSION = "rl.version.drafter"
PROFILE = "rl.version.profile"
TARGET = "rl.weights.target"
WEIGHTS_VERSION = "rl.weights.version"

# ---- attributes of reinforcement learning: amounts and durations

TASKS = "rl.tasks"
SAMPLES_PER_TASK = "rl.samples_per_task"
TRAJECTORIES = "rl.trajectories"
ZERO_VARIANCE_GROUPS = "rl.groups.zero_variance"
ROWS = "rl.features.rows"
BATCHES = "rl.features.batches"
BYTES = "rl.bytes"
RELEASED_BYTES = "rl.released_bytes"
ARM = "rl.arm"
ROUNDS = "rl.rounds"
TOKENS = "rl.tokens"
BUSY_S = "rl.busy_s"
TARGET_STEPS = "rl.target_steps"
ACCEPT_LENGTH = "rl.accept_length"
TIME_PER_OUTPUT_TOKEN_S = "rl.time_per_output_token_s"  # noqa: S105  a name
VERIFIED_TOKENS = "rl.verified_tokens"
REGRET = "rl.regret"
DRAFTER = "rl.drafter"
POSITIONS = "rl.drafter.positions"
LOSS = "rl.drafter.loss"
STEPPED = "rl.drafter.stepped"
DECISION = "rl.drafter.decision"


def arm_rounds(arm: str) -> str:
    """Attribute with the rounds of one arm."""
    return f"rl.arm_rounds.{arm}"


def round_time_s(stage: str) -> str:
    """Attribute with the seconds of rounds in one stage."""
    return f"rl.round_time.{stage}_s"
