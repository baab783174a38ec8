"""A variant of each plug-in family, added according to CONTRIBUTING.md and used through `paceline
serve gateway`.

It takes at most two places of the tree, or none with an import path.
"""

from __future__ import annotations

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from recipes.checkout import CLI, MODEL, Change, Checkout, places
from recipes.twins import (
    BANDIT,
    ENGINE,
    ENVIRONMENT,
    OWN_KIND,
    REWARD,
    SPECULATOR,
    TABLE_KIND,
    TABLE_REWARD,
)

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

G, S = "services/rollout_gateway", "libs/paceline/speculators"
TWIN = "paceline.speculators.twin"
IN_THE_TREE = {
    "speculator": (
        Change(f"{S}/twin.py", SPECULATOR.format(kind=TABLE_KIND)),
        Change(
            f"{S}/kinds.py",
            f'    SpeculatorKind("twin", "{TWIN}:TwinDrafter", "{TWIN}:TwinNet", ("Twin",)),\n',
            ")\nSPECULATORS = ",
        ),
    ),
    "bandit": (
        Change(f"{G}/bandits/twin.py", BANDIT),
        Change(
            f"{G}/bandits/__init__.py",
            "from paceline.services.rollout_gateway.bandits.twin import LastArm\n",
            "from paceline.services.rollout_gateway.bandits.watchdog",
        ),
        Change(
            f"{G}/bandits/__init__.py",
            '    "twin": LastArm,\n',
            '    "beg": kinds.BucketedEpsilonGreedy,\n',
        ),
    ),
    "environment": (
        Change(f"{G}/environments/twin.py", ENVIRONMENT),
        Change(
            f"{G}/environments/table.py",
            "from paceline.services.rollout_gateway.environments.twin import Signed\n",
            "from paceline.services.rollout_gateway.sandbox import",
        ),
        Change(f"{G}/environments/table.py", '    "twin": Signed,\n', '    "tool_use": lambda'),
    ),
    "reward": (
        Change(f"{G}/rewards/twin.py", TABLE_REWARD),
        Change(
            f"{G}/rewards/rules.py",
            "from paceline.services.rollout_gateway.rewards.twin import Signature\n",
            "from paceline.services.rollout_gateway.sandbox",
        ),
        Change(
            f"{G}/rewards/rules.py",
            '    "twin": lambda rules: Signature(),\n',
            '    "code_tests": lambda',
        ),
    ),
    "engine": (
        Change(f"{G}/engines/twin.py", ENGINE),
        Change(
            f"{G}/engines/__init__.py",
            '    "twin": EngineKind(f"{_TWIN}:TwinSpec", f"{_TWIN}:build"),\n'.replace(
                "{_TWIN}", "paceline.services.rollout_gateway.engines.twin"
            ),
            '    "sglang": EngineKind(',
        ),
    ),
}
NAMED = dict.fromkeys(IN_THE_TREE, "twin")
OF_ONES_OWN = {
    "speculator": (Change("my_speculator.py", SPECULATOR.format(kind=OWN_KIND)),),
    "bandit": (Change("my_bandit.py", BANDIT),),
    "environment": (Change("my_environment.py", ENVIRONMENT),),
    "reward": (Change("my_reward.py", REWARD),),
    "engine": (Change("my_engine.py", ENGINE),),
}
CONFIGURED = (
    "engine.options.words=7",
    "environments.signed=my_environment:Signed",
    "rewards.own.signature=my_reward.py:Signature",
)
BY_PATH = {
    "speculator": "my_speculator:KIND",
    "bandit": "my_bandit.py:LastArm",
    "environment": "signed",
    "reward": "signature",
    "engine": "my_engine.py:KIND",
}


def rounds_by_arm(page: str) -> dict[str, float]:
    """Rounds of each arm so far."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return {
        sample.labels["arm"]: sample.value
        for sample in families["paceline_engine_arm_rounds"].samples
        if sample.value
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changes", "names"), [(IN_THE_TREE, NAMED), (OF_ONES_OWN, BY_PATH)], ids=["table", "path"]
)
def test_a_new_engine_bandit_environment_and_reward_serve_tasks(
    changes: dict[str, tuple[Change, ...]], names: dict[str, str], checkout: Checkout
) -> None:
    for family in ("engine", "bandit", "environment", "reward"):
        assert places(changes[family]) <= 2, "a recipe touches two places at most"
        checkout.change(changes[family])
    request = rpb.RunTasksRequest(
        context=tpb.CommandContext(run_id="local", step=0, epoch=1),
        purpose=tpb.PURPOSE_EVAL,
        tasks=[rpb.TaskSpec(task_id="a", prompt="1+1=", group_id="g", task_index=0)],
        samples_per_task=2,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=64),
        run_seed=7,
        environment=names["environment"],
        reward=names["reward"],
    )
    own = () if names["engine"] == "twin" else CONFIGURED
    engine = ("--engine", names["engine"], "engine.workers=1", *own)
    with (
        checkout.gateway(*engine, f"speculation.bandit.kind={names['bandit']}") as (http, address),
        grpc.insecure_channel(address) as channel,
    ):
        news = list(RolloutServiceStub(channel).RunTasks(request, timeout=patient(30)))
        page = http.get("/metrics").text
    samples = [one.sample for one in news if one.HasField("sample")]
    assert [sample.reward.value for sample in samples] == [0.25, 0.25]
    assert [sample.response_tokens for sample in samples] == [7 if own else 5] * 2
    assert list(rounds_by_arm(page)) == ["ngram:4_1_5"], "the bandit takes the last arm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "names"), [(IN_THE_TREE, NAMED), (OF_ONES_OWN, BY_PATH)], ids=["table", "path"]
)
def test_a_new_speculator_drafts_under_the_name_that_the_command_line_is_given(
    changes: dict[str, tuple[Change, ...]], names: dict[str, str], checkout: Checkout
) -> None:
    assert places(changes["speculator"]) <= 2, "a recipe touches two places at most"
    checkout.change(changes["speculator"])
    words = ("--drafter", names["speculator"], "engine.workers=1")
    with checkout.gateway(*words, "speculation.forced_arm=twin:3_1_4") as (http, _):
        body = {"model": "policy_start", "prompt": "1+1=", "max_tokens": 16}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert list(rounds_by_arm(http.get("/metrics").text)) == ["twin:3_1_4"]


@pytest.mark.slow
def test_a_drafter_that_is_none_is_refused_with_those_there_are(checkout: Checkout) -> None:
    done = checkout.python(CLI, "serve", "gateway", "--model", str(MODEL), "--drafter", "medusa")
    assert done.returncode == 2
    assert (
        "no such speculator; seen: medusa; allowed: dflash, eagle, eagle3, lstm, ngram"
        in done.stderr
    )
