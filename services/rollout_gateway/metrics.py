"""The gateway's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter, Gauge, Histogram, UpDownCounter

# 15 ms and 50 ms are the lines of the service level.
TOKEN_BOUNDARIES_S = (0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
FIRST_BOUNDARIES_S = (0.01, 0.015, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LENGTH_BOUNDARIES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
WAIT_BOUNDARIES_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
HTTP_BOUNDARIES_S = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300),
)
ENGINE = ("engine",)
ENGINE_WORKER = ("engine", "worker")

# Requests of the engine, when they end.
TIME_TO_FIRST_TOKEN = Histogram(
    "paceline.engine.time_to_first_token",
    "s",
    ENGINE,
    "from the queue of the worker to the first token",
    FIRST_BOUNDARIES_S,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "paceline.engine.time_per_output_token",
    "s",
    ENGINE,
    "mean of a request's tokens after the first; boundaries at the service levels 0.015 and 0.05",
    TOKEN_BOUNDARIES_S,
)
ACCEPT_LENGTH = Histogram(
    "paceline.engine.accept_length",
    "{token}",
    ENGINE,
    "mean tokens of a request's drafted rounds, the bonus token included",
    LENGTH_BOUNDARIES,
)
DRAFTS_PROPOSED = Counter(
    "paceline.engine.drafts_proposed",
    "{draft}",
    ("engine", "position"),
    "drafts at position 1, 2, ... of their path",
)
DRAFTS_ACCEPTED = Counter(
    "paceline.engine.drafts_accepted",
    "{draft}",
    ("engine", "position"),
    "those that were accepted; by those proposed it is acceptance by position",
)

QUARANTINED = UpDownCounter(
    "paceline.gateway.quarantined",
    "{path}",
    ("path",),
    "1 for each path that no worker takes because the audit found it inexact",
)

# Workers, when somebody looks.
ENGINE_TOKENS = Counter(
    "paceline.engine.tokens",
    "{token}",
    ENGINE_WORKER,
    "tokens emitted; its rate is tokens/s of wall time",
)
BUSY_TIME = Counter("paceline.engine.busy_time", "s", ENGINE_WORKER, "seconds with work")
ENGINE_REQUESTS = Gauge(
    "paceline.engine.requests",
    "{request}",
    (*ENGINE_WORKER, "state"),
    "inside the worker at the last look; state: running or waiting",
)
TOKENS_PER_SECOND = Gauge(
    "paceline.engine.tokens_per_second",
    "{token}/s",
    ENGINE_WORKER,
    "tokens by busy seconds between the last two looks that saw work",
)
DEVICE_TFLOPS = Gauge(
    "paceline.engine.device_tflops",
    "{Tflop}",
    ENGINE_WORKER,
    "10^12 operations/s: the measured peak of a square matrix product in the model's dtype at "
    "start, with the worker's threads; not the vendor's number. Absent where nothing was measured",
)
TOKENS_PER_SECOND_PER_TFLOPS = Gauge(
    "paceline.engine.tokens_per_second_per_tflops",
    "{token}/{Tflop}",
    ENGINE_WORKER,
    "tokens_per_second by device_tflops",
)
ROUNDS = Counter("paceline.engine.rounds", "{round}", ENGINE, "decode rounds")
VERIFIED_TOKENS = Counter(
    "paceline.engine.verified_tokens",
    "{token}",
    ENGINE,
    "tokens that the target verified in decode rounds",
)
ROUND_TIME = Counter(
    "paceline.engine.round_time",
    "s",
    ("engine", "stage"),
    "stage: prefill, draft, forward, sample (draws and verification) or keep (cache and states of "
    "what was accepted). SGLang reports none; the scripted engine forward only",
)
SEQUENCE_ROUNDS = Counter(
    "paceline.engine.sequence_rounds",
    "{round}",
    ("engine", "drafts"),
    "rounds of single sequences; drafts: none, untrained (of n-grams) or trained",
)
SEQUENCE_ROUND_TOKENS = Counter(
    "paceline.engine.sequence_round_tokens",
    "{token}",
    ("engine", "drafts"),
    "tokens of rounds with drafts, the bonus token included; by sequence_rounds it is the "
    "acceptance length",
)
DRAFTED_TOKENS = Counter(
    "paceline.engine.drafted_tokens",
    "{token}",
    ("engine", "fate"),
    "tokens that a drafter proposed; fate: accepted or rejected",
)
ARM_ROUNDS = Counter(
    "paceline.engine.arm_rounds",
    "{round}",
    ("engine", "arm", "batch_group"),
    "rounds in which an arm was chosen",
)
ARM_EXPLORATIONS = Counter(
    "paceline.engine.arm_explorations",
    "{round}",
    ("engine", "arm", "batch_group"),
    "those of arm_rounds that were chosen to learn of the arm",
)
ARM_TOKENS_PER_SECOND = Gauge(
    "paceline.engine.arm_tokens_per_second",
    "{token}/s",
    (*ENGINE_WORKER, "arm", "batch_group"),
    "mean over the bandit's window of rounds with the arm",
)
ARM_ACCEPT_LENGTH = Gauge(
    "paceline.engine.arm_accept_length",
    "{token}",
    (*ENGINE_WORKER, "arm", "batch_group"),
    "mean tokens of a sequence's round over the same window",
)
REGRET = Gauge(
    "paceline.engine.regret",
    "1",
    ENGINE_WORKER,
    "0 to 1: share of tokens/s lost to arms other than the best one in hindsight; an estimate, "
    "each arm judged by the mean of its own rounds (`workers/regret.py`)",
)
DEAD_DRAFTERS = Counter(
    "paceline.engine.dead_drafters",
    "{drafter}",
    ("engine", "worker", "speculator", "batch_group"),
    "drafters found dead: nothing of theirs is accepted and their arms rest; also a warning in "
    "the gateway's log",
)
PROMPT_TOKENS = Counter(
    "paceline.engine.prompt_tokens", "{token}", ENGINE, "prompt tokens of ended requests"
)
KV_HIT_TOKENS = Counter(
    "paceline.engine.kv_hit_tokens",
    "{token}",
    ENGINE,
    "prompt tokens of ended requests that were cached",
)
KV_HIT_RATE = Gauge(
    "paceline.engine.kv_hit_rate",
    "1",
    ENGINE_WORKER,
    "0 to 1: kv_hit_tokens by prompt_tokens since the worker started",
)
KV_LOOKUPS = Counter(
    "paceline.engine.kv_lookups", "{lookup}", ENGINE, "prompts looked up in the prefix cache"
)
KV_ACCESS_TIME = Counter(
    "paceline.engine.kv_access_time",
    "s",
    ("engine", "part"),
    "part: lookup finds what is cached, copy brings it where it is read",
)
ROWS_LEFT_OUT = Counter(
    "paceline.engine.rows_left_out",
    "{row}",
    ("engine", "reason"),
    "hidden rows that never left their worker; reason: no_room in its ring or, of SGLang, on the "
    "way from the device; invalid: a slot of SGLang's cache held the row of another token or none; "
    "rejected: of drafts beyond those that are written per request and round",
)

# Calls and workers of the gateway.
REQUESTS = Counter(
    "paceline.gateway.requests", "{request}", (), "generations that callers asked for"
)
REQUESTS_REFUSED = Counter(
    "paceline.gateway.requests_refused", "{request}", (), "those that were refused"
)
REQUESTS_SUSPENDED = Counter(
    "paceline.gateway.requests_suspended",
    "{request}",
    ("reason",),
    "running requests that were taken from their worker and go on from their tokens; reason: lease "
    "(its slot was lent out) or commit (of a new policy under mode abort)",
)
NOT_FINITE = Counter(
    "paceline.gateway.not_finite",
    "{request}",
    (),
    "requests ended because the engine gave a log-prob that is NaN or infinite",
)
SETS_REFUSED = Counter(
    "paceline.gateway.sets_refused",
    "{set}",
    ("check",),
    "sets that the canary refused, by the check that they failed",
)
TOKENS = Counter("paceline.gateway.tokens", "{token}", (), "tokens that workers sent")
WORKER_RESTARTS = Counter(
    "paceline.gateway.worker_restarts", "{restart}", (), "workers started again"
)
FEATURE_BATCHES = Counter(
    "paceline.gateway.feature_batches",
    "{batch}",
    (),
    "batches of hidden-state rows that were appended to their stream",
)
FEATURE_ROWS_DROPPED = Counter(
    "paceline.gateway.feature_rows_dropped",
    "{row}",
    (),
    "hidden-state rows given up while their stream was full",
)
HTTP_REQUESTS = Counter(
    "paceline.gateway.http.requests",
    "{request}",
    ("route", "status"),
    "answers by the route's pattern; 499: the client went away before there was one",
)
HTTP_DURATION = Histogram(
    "paceline.gateway.http.duration",
    "s",
    ("route", "status"),
    "from the request to the end of its answer",
    HTTP_BOUNDARIES_S,
)
HTTP_OPEN = UpDownCounter("paceline.gateway.http.open", "{request}", (), "requests under way")
QUEUE_WAITING = UpDownCounter(
    "paceline.gateway.queue.waiting", "{request}", (), "in line for the engine"
)
QUEUE_RUNNING = UpDownCounter(
    "paceline.gateway.queue.running", "{request}", (), "inside the engine"
)
QUEUE_REFUSED = Counter(
    "paceline.gateway.queue.refused",
    "{request}",
    ("reason",),
    "reason: QUEUE_FULL, KEY_QUEUE_FULL or QUEUE_WAIT",
)
QUEUE_WAIT = Histogram(
    "paceline.gateway.queue.wait",
    "s",
    (),
    "how long those that entered had waited",
    WAIT_BOUNDARIES_S,
)

# Rewards: one series a rule, its name or the import path of a user's own; at most 64 of those.
SCORES = Counter("paceline.reward.scores", "{score}", ("rule",), "finite rewards given")
UNSCORED = Counter(
    "paceline.reward.unscored",
    "{score}",
    ("rule",),
    "episodes that a rule gave no reward: null, or a failure by `exception` or `deadline`",
)
REWARD_FAILURES = Counter(
    "paceline.reward.failures",
    "{failure}",
    ("rule", "reason"),
    "exception: a user's rule raised, or the reward model could not read a text; deadline: a child "
    "took longer than `rewards.deadline_s` and was ended. Both leave the sample unscored and their "
    "text in the log. reward_not_finite: NaN or infinite; unavailable: children died, the URL or "
    "the model did not answer; circuit_open: nobody asked the URL. These fail the sample",
)
REWARD_TIME = Histogram(
    "paceline.reward.time",
    "s",
    ("rule",),
    "from the question to its answer or failure, waiting for a child or a connection included",
)
