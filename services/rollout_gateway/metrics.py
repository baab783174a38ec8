"""The gateway's metrics. `make docs` writes them into docs/metrics.md."""

from paceline.telemetry.metrics import Counter, Gauge, Histogram, UpDownCounter

# Boundaries of histograms. 15 ms and 50 ms are the limits of the service levels.
TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
FIRST_S = (0.01, 0.015, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LENGTHS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
HTTP_S = (0.002, 0.005, *WAIT_S[1:])
ENGINE = ("engine",)
ENGINE_WORKER = ("engine", "worker")
ENGINE_STATE = (*ENGINE_WORKER, "state")
DRAFTER = ("engine", "worker", "speculator", "batch_group")
DRAFTS = ("engine", "drafts")
POSITION = ("engine", "position")
ARM = ("engine", "arm", "batch_group")
ARM_WORKER = ("engine", "worker", "arm", "batch_group")
ROUTE = ("route", "status")

# Requests of the engine, at their end.
TIME_TO_FIRST_TOKEN = Histogram("paceline.engine.time_to_first_token", "s", ENGINE, FIRST_S)
"""from the queue to the first token"""
TIME_PER_OUTPUT_TOKEN = Histogram("paceline.engine.time_per_output_token", "s", ENGINE, TOKEN_S)
"""mean per token after the first"""
ACCEPT_LENGTH = Histogram("paceline.engine.accept_length", "{token}", ENGINE, LENGTHS)
"""mean tokens per drafted round"""
DRAFTS_PROPOSED = Counter("paceline.engine.drafts_proposed", "{draft}", POSITION)
"""drafts at this position of their path"""
DRAFTS_ACCEPTED = Counter("paceline.engine.drafts_accepted", "{draft}", POSITION)
"""accepted drafts at this position"""
QUARANTINED = UpDownCounter("paceline.gateway.quarantined", "{path}", ("path",))
"""1 for each path disabled as inexact"""

# Workers, at a poll.
ENGINE_TOKENS = Counter("paceline.engine.tokens", "{token}", ENGINE_WORKER)
"""emitted tokens"""
BUSY_TIME = Counter("paceline.engine.busy_time", "s", ENGINE_WORKER)
"""time with work"""
ENGINE_REQUESTS = Gauge("paceline.engine.requests", "{request}", ENGINE_STATE)
"""requests at the last poll, by state"""
TOKENS_PER_SECOND = Gauge("paceline.engine.tokens_per_second", "{token}/s", ENGINE_WORKER)
"""tokens per busy second"""
DEVICE_TFLOPS = Gauge("paceline.engine.device_tflops", "{Tflop}", ENGINE_WORKER)
"""measured peak of a matrix product"""
TOKENS_PER_SECOND_PER_TFLOPS = Gauge(
    "paceline.engine.tokens_per_second_per_tflops", "{token}/{Tflop}", ENGINE_WORKER
)
"""tokens_per_second divided by device_tflops"""
ROUNDS = Counter("paceline.engine.rounds", "{round}", ENGINE)
"""decode rounds"""
VERIFIED_TOKENS = Counter("paceline.engine.verified_tokens", "{token}", ENGINE)
"""verified tokens"""
ROUND_TIME = Counter("paceline.engine.round_time", "s", ("engine", "stage"))
"""time by stage: prefill, draft, forward, sample (draws and verification) or keep (caching of
accepted tokens). SGLang reports none
"""
SEQUENCE_ROUNDS = Counter("paceline.engine.sequence_rounds", "{round}", DRAFTS)
"""rounds; drafts: none, untrained, trained"""
SEQUENCE_ROUND_TOKENS = Counter("paceline.engine.sequence_round_tokens", "{token}", DRAFTS)
"""tokens of drafted rounds"""
DRAFTED_TOKENS = Counter("paceline.engine.drafted_tokens", "{token}", ("engine", "fate"))
"""accepted or rejected drafts"""
ARM_ROUNDS = Counter("paceline.engine.arm_rounds", "{round}", ARM)
"""rounds by chosen arm"""
ARM_EXPLORATIONS = Counter("paceline.engine.arm_explorations", "{round}", ARM)
"""exploring rounds"""
ARM_TOKENS_PER_SECOND = Gauge("paceline.engine.arm_tokens_per_second", "{token}/s", ARM_WORKER)
"""mean in the bandit's window"""
ARM_ACCEPT_LENGTH = Gauge("paceline.engine.arm_accept_length", "{token}", ARM_WORKER)
"""mean tokens per sequence and round"""
REGRET = Gauge("paceline.engine.regret", "1", ENGINE_WORKER)
"""estimated share of tokens/s lost, 0 to 1"""
DEAD_DRAFTERS = Counter("paceline.engine.dead_drafters", "{drafter}", DRAFTER)
"""drafters without acceptance, at rest"""
PROMPT_TOKENS = Counter("paceline.engine.prompt_tokens", "{token}", ENGINE)
"""of ended requests"""
KV_HIT_TOKENS = Counter("paceline.engine.kv_hit_tokens", "{token}", ENGINE)
"""cached prompt tokens"""
KV_HIT_RATE = Gauge("paceline.engine.kv_hit_rate", "1", ENGINE_WORKER)
"""cached share of prompts"""
KV_LOOKUPS = Counter("paceline.engine.kv_lookups", "{lookup}", ENGINE)
"""prefix cache lookups"""
KV_ACCESS_TIME = Counter("paceline.engine.kv_access_time", "s", ("engine", "part"))
"""prefix cache; part: lookup or copy"""
ROWS_LEFT_OUT = Counter("paceline.engine.rows_left_out", "{row}", ("engine", "reason"))
"""hidden rows that never left their worker; reason: no_room (in its ring, or SGLang's transfer from
the device) or invalid (SGLang's cache slot held another row or none)
"""

# Calls and workers of the gateway.
REQUESTS = Counter("paceline.gateway.requests", "{request}")
"""generation requests of callers"""
REQUESTS_REFUSED = Counter("paceline.gateway.requests_refused", "{request}")
"""refused requests"""
REQUESTS_SUSPENDED = Counter("paceline.gateway.requests_suspended", "{request}", ("reason",))
"""running requests that were interrupted and continue from their tokens; reason: lease (its slot
was lent) or commit (of a new policy, mode abort)
"""
NOT_FINITE = Counter("paceline.gateway.not_finite", "{request}")
"""non-finite log-probs"""
SETS_REFUSED = Counter("paceline.gateway.sets_refused", "{set}", ("check",))
"""refused by a canary"""
TOKENS = Counter("paceline.gateway.tokens", "{token}")
"""tokens received from workers"""
WORKER_RESTARTS = Counter("paceline.gateway.worker_restarts", "{restart}")
"""worker restarts"""
FEATURE_BATCHES = Counter("paceline.gateway.feature_batches", "{batch}")
"""batches in Redis"""
FEATURE_ROWS_DROPPED = Counter("paceline.gateway.feature_rows_dropped", "{row}")
"""hidden rows that found no room"""
ENVIRONMENT_ATTEMPTS = Counter(
    "paceline.gateway.environment.attempts", "{attempt}", ("environment", "outcome")
)
"""ended attempts of environments of verifiers; outcome: scored, data (a fault of environment or
task), infra (a lost process, or the gateway was away) or silent
"""
HTTP_REQUESTS = Counter("paceline.gateway.http.requests", "{request}", ROUTE)
"""answers; status 499: client disconnected"""
HTTP_DURATION = Histogram("paceline.gateway.http.duration", "s", ROUTE, HTTP_S)
"""time of a request"""
HTTP_OPEN = UpDownCounter("paceline.gateway.http.open", "{request}")
"""requests in progress"""
QUEUE_WAITING = UpDownCounter("paceline.gateway.queue.waiting", "{request}")
"""waiting requests"""
QUEUE_RUNNING = UpDownCounter("paceline.gateway.queue.running", "{request}")
"""in the engine"""
QUEUE_REFUSED = Counter("paceline.gateway.queue.refused", "{request}", ("reason",))
"""requests refused; reason: QUEUE_FULL, KEY_QUEUE_FULL, QUEUE_WAIT or LARGE_REQUESTS"""
QUEUE_WAIT = Histogram("paceline.gateway.queue.wait", "s", (), WAIT_S)
"""wait before the engine"""

# Rewards: one series per rule, by its name or the import path of a user's rule; at most 64 series.
RULE = ("rule",)
SCORES = Counter("paceline.reward.scores", "{score}", RULE)
"""finite rewards"""
UNSCORED = Counter("paceline.reward.unscored", "{score}", RULE)
"""null, exceptions and deadlines"""
REWARD_FAILURES = Counter("paceline.reward.failures", "{failure}", ("rule", "reason"))
"""failures of rules. exception (a rule raised, or the model could not read a text) and deadline
(above `rewards.deadline_s`) leave the sample unscored and are logged. reward_not_finite and
unavailable (children died; URL or model did not answer) fail the sample
"""
REWARD_TIME = Histogram("paceline.reward.time", "s", RULE)
"""time from request to reward or failure"""
