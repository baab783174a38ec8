"""Fencing, the rule for addresses, and the forms of errors, without a server."""

import hashlib
import hmac
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from paceline import errors
from paceline.config import SecurityConfig
from paceline.errors import (
    ConfigError,
    DataLoss,
    InvalidInput,
    PacelineError,
    ResourceExhausted,
    StaleEpoch,
)
from paceline.local.patience import patient
from paceline.rpc import EpochGuard, Track, error_from_rpc, leased
from paceline.rpc.security import check_events, check_security, check_token
from paceline.rpc.status import code_of, status_of
from paceline.v1 import coordinator_pb2, drafter_pb2, policy_pb2, rollout_pb2, weights_pb2
from paceline.v1.trajectory_pb2 import CommandContext


def every_class(cls: type[PacelineError] = PacelineError) -> list[type[PacelineError]]:
    return [found for child in cls.__subclasses__() for found in (child, *every_class(child))]


OURS = [cls for cls in every_class() if cls.__module__ == errors.__name__]


def raised(error: PacelineError) -> grpc.aio.AioRpcError:
    status = rpc_status.to_status(status_of(error))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("reason", [None, "OF_ITS_OWN"])
def test_every_class_comes_back_as_itself(cls: type[PacelineError], reason: str | None) -> None:
    back = error_from_rpc(raised(cls("what was wrong", reason=reason, seen=3, allowed="1 or 2")))
    assert type(back) is cls
    assert (back.message, back.reason, back.seen, back.allowed) == (
        "what was wrong",
        reason or cls.reason,
        "3",
        "1 or 2",
    )


def test_a_services_own_subclass_comes_back_as_the_nearest_shared_class() -> None:
    class RankLost(errors.Unavailable):
        reason = "RANK_LOST"

    back = error_from_rpc(raised(RankLost("rank 1 died")))
    assert (type(back), back.reason) == (errors.Unavailable, "RANK_LOST")


def test_seen_and_allowed_keep_absent_apart_from_empty() -> None:
    back = error_from_rpc(raised(InvalidInput("x", seen="")))
    assert (back.seen, back.allowed) == ("", None)


@pytest.mark.parametrize("cls", [errors.ResourceExhausted, errors.Unavailable])
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (7.25, 7.25),
        (0.0, 0.0),
        (None, 1.0),
        (-3.0, 0.0),
        (float("inf"), 3600.0),
        (float("nan"), 1.0),
    ],
)
def test_an_error_that_passes_says_when_to_come_again(
    cls: type[PacelineError], said: float | None, heard: float
) -> None:
    status = status_of(cls("later", retry_after_s=said))
    retry = RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1000 * heard
    back = error_from_rpc(raised(cls("later", retry_after_s=said)))
    assert (type(back), back.retry_after_s) == (cls, heard)


def test_an_error_that_stays_does_not_ask_for_another_try() -> None:
    status = status_of(InvalidInput("never", retry_after_s=3))
    assert [detail.Is(RetryInfo.DESCRIPTOR) for detail in status.details] == [False]
    assert error_from_rpc(raised(InvalidInput("never", retry_after_s=3))).retry_after_s is None


def foreign(*details: Any) -> grpc.aio.AioRpcError:
    status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="busy", details=details)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="busy"
    )


@pytest.mark.parametrize(("seconds", "heard"), [(3, 3.0), (-(10**11), 0.0), (10**11, 3600.0)])
def test_a_foreign_servers_retry_info_is_heard_within_bounds(seconds: int, heard: float) -> None:
    detail = Any()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    back = error_from_rpc(foreign(detail))
    assert (type(back), back.retry_after_s) == (errors.Unavailable, heard)


def test_a_broken_detail_does_not_hide_the_next_one() -> None:
    broken = Any(
        type_url=f"type.googleapis.com/{ErrorInfo.DESCRIPTOR.full_name}", value=b"\xff\xff"
    )
    whole = Any()
    whole.Pack(RetryInfo(retry_delay=Duration(nanos=500_000_000)))
    assert error_from_rpc(foreign(broken, whole)).retry_after_s == 0.5
    assert error_from_rpc(foreign(broken)).retry_after_s is None


def test_the_detail_is_a_standard_error_info() -> None:
    status = status_of(StaleEpoch("late", seen=1, allowed="at least 2"))
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("STALE_EPOCH", "paceline")
    assert dict(info.metadata) == {"family": "STALE_EPOCH", "seen": "1", "allowed": "at least 2"}


def test_a_long_error_fits_into_the_headers() -> None:
    status = status_of(InvalidInput("ü" * 100_000, seen="y" * 100_000, allowed="z" * 100_000))
    assert len(status.SerializeToString()) * 4 / 3 + 6 * len(status.message) < 8192


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (grpc.StatusCode.UNIMPLEMENTED, errors.MissingCapability),
        (grpc.StatusCode.UNAUTHENTICATED, errors.ConfigError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.INTERNAL, errors.Unavailable),  # "Internal error from Core"
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
    ],
)
def test_errors_of_grpc_itself_get_the_class_of_their_code(
    code: grpc.StatusCode, cls: type[PacelineError]
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")
    back = error_from_rpc(error)
    assert (type(back), back.message) == (cls, "gone")


def test_every_code_has_a_class() -> None:
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata()))
    assert {code_of(cls("x")) for cls in OURS} <= set(grpc.StatusCode) - {
        grpc.StatusCode.OK,
        grpc.StatusCode.UNKNOWN,
    }


def test_broken_details_leave_the_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, details="nothing there"
    )
    assert type(error_from_rpc(error)) is errors.NotFound


RUN_TASKS, GENERATE = (f"/paceline.v1.RolloutService/{name}" for name in ("RunTasks", "Generate"))


def context(epoch: int, run: str = "r") -> CommandContext:
    return CommandContext(run_id=run, epoch=epoch)


def test_an_epoch_below_the_highest_seen_is_stale_per_run() -> None:
    guard = EpochGuard(SecurityConfig())
    for epoch in (1, 1, 3):
        guard.check(context(epoch), Track.ROLLOUTS)
    with pytest.raises(StaleEpoch, match="seen: 2; allowed: at least 3"):
        guard.check(context(2), Track.ROLLOUTS)
    guard.check(context(1, run="other"), Track.ROLLOUTS)
    guard.check(context(3), Track.ROLLOUTS)
    assert (
        guard.highest("r", Track.ROLLOUTS),
        guard.highest("other", Track.ROLLOUTS),
        guard.highest("never", Track.ROLLOUTS),
    ) == (3, 1, 0)


def test_an_old_lease_is_stale_after_a_restart_too_and_a_new_one_once_its_epoch_is_kept(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "not" / "there" / "epochs.json"
    guard = EpochGuard(SecurityConfig(), kept)
    guard.check(context(6), Track.ROLLOUTS)
    guard.check(context(2, run="other"), Track.ROLLOUTS)

    restarted = EpochGuard(SecurityConfig(), kept)
    with pytest.raises(StaleEpoch, match="seen: 1; allowed: at least 6"):
        restarted.check(context(1), Track.ROLLOUTS)
    assert (restarted.highest("r", Track.ROLLOUTS), restarted.highest("other", Track.ROLLOUTS)) == (
        6,
        2,
    )

    kept.unlink()
    kept.mkdir()  # nothing can be written there
    (kept / "x").touch()
    with pytest.raises(ResourceExhausted, match="cannot be written"):
        restarted.check(context(7), Track.ROLLOUTS)
    assert restarted.highest("r", Track.ROLLOUTS) == 6


@pytest.mark.parametrize("text", ["", "[]", '{"r": "many"}', "[" * 5000, '{"r": null}'])
def test_a_file_that_holds_no_epochs_is_refused_and_not_overlooked(
    tmp_path: Path, text: str
) -> None:
    kept = tmp_path / "epochs.json"
    kept.write_text(text)
    with pytest.raises(DataLoss, match=r"epochs.json holds no epochs"):
        EpochGuard(SecurityConfig(), kept)


def test_a_command_without_a_run_is_refused() -> None:
    for run in ("", "UPPER", "a" * 65):
        with pytest.raises(InvalidInput, match="names its run"):
            EpochGuard(SecurityConfig()).check(context(1, run=run), Track.ROLLOUTS)


def test_with_tokens_a_new_epoch_needs_the_proof_that_the_coordinator_alone_can_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    security = SecurityConfig()
    guard = EpochGuard(security)
    lease = leased(security, "r", 3, 7)
    expected = hmac.new(b"secret", b"lease 7 of r", hashlib.sha256).hexdigest()
    assert lease == CommandContext(run_id="r", step=3, epoch=7, lease_proof=expected)

    guard.check(lease, Track.ROLLOUTS)
    guard.check(context(7), Track.ROLLOUTS)  # cached by now
    for forged in (
        context(2**64 - 1),
        context(1, run="other"),
        CommandContext(run_id="r", epoch=8, lease_proof=expected),
        CommandContext(run_id="s", epoch=7, lease_proof=expected),
        CommandContext(run_id="r", epoch=8, lease_proof="é"),
    ):
        with pytest.raises(InvalidInput, match="no lease of run"):
            guard.check(forged, Track.ROLLOUTS)
    guard.check(leased(security, "r", 3, 8), Track.ROLLOUTS)
    assert (guard.highest("r", Track.ROLLOUTS), guard.highest("other", Track.ROLLOUTS)) == (8, 0)


def test_fencing_remembers_a_bounded_number_of_runs() -> None:
    guard = EpochGuard(SecurityConfig())
    for index in range(1000):
        guard.check(context(1, run=f"r{index}"), Track.ROLLOUTS)
    assert guard.highest("r0", Track.ROLLOUTS) == 0
    assert guard.highest("r999", Track.ROLLOUTS) == 1


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.9.9.9:0", "localhost:7", "[::1]:5", "unix:/tmp/x.sock"]
)
def test_loopback_needs_no_security(address: str) -> None:
    check_security(address, SecurityConfig())


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:7", "example.org:7", "localhost.example.org:7"]
)
def test_beyond_loopback_token_and_tls_are_demanded(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"missing: a token in \$PACELINE_TOKEN, security.tls_cert .*security.tls_ca",
    ):
        check_security(address, SecurityConfig())
    check_security(address, SecurityConfig(allow_insecure=True))
    monkeypatch.setenv("PACELINE_TOKEN", "t")
    with pytest.raises(ConfigError, match=r"missing: security\.tls_ca;"):
        check_security(address, SecurityConfig(tls_cert="c", tls_key="k"))
    check_security(address, SecurityConfig(tls_cert="c", tls_key="k", tls_ca="a"))


def test_a_certificate_without_its_key_is_refused_everywhere() -> None:
    with pytest.raises(ConfigError, match="go together"):
        check_security("127.0.0.1:1", SecurityConfig(tls_cert="c"))


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", "bearer right", "right", b"Bearer wrong", "Bearer ü"],
)
def test_only_the_right_token_passes(
    given: str | bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = SecurityConfig()
    check_token(security, RUN_TASKS, [])
    monkeypatch.setenv("PACELINE_TOKEN", "right")
    with pytest.raises(ConfigError) as caught:
        check_token(security, GENERATE, [] if given is None else [("authorization", given)])
    assert caught.value.reason == "UNAUTHENTICATED"
    assert "right" not in str(caught.value)
    check_token(security, RUN_TASKS, [("x", "y"), ("authorization", "Bearer right")])


def test_the_agents_token_opens_sessions_and_generation_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "operators")
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "agents")
    security, metadata = SecurityConfig(), [("authorization", "Bearer agents")]
    services = (coordinator_pb2, drafter_pb2, policy_pb2, rollout_pb2, weights_pb2)
    methods = [
        f"/{service.full_name}/{method.name}"
        for module in services
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    refused = {}
    for method in methods:
        check_token(security, method, [("authorization", "Bearer operators")])
        try:
            check_token(security, method, metadata)
        except ConfigError as error:
            refused[method] = code_of(error)
    assert set(refused.values()) == {grpc.StatusCode.PERMISSION_DENIED}
    opened = [method.rpartition("/")[2] for method in methods if method not in refused]
    assert opened == ["Generate"]


def test_agents_tokens_without_an_operators_one_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "agents")
    with pytest.raises(ConfigError, match="operators have none"):
        check_security("127.0.0.1:1", SecurityConfig())


MALLOC = "from paceline.processor import keep_freed_memory; print(keep_freed_memory())"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
@pytest.mark.parametrize(
    ("environment", "set_here"), [({}, "True"), ({"MALLOC_ARENA_MAX": "2"}, "False")]
)
def test_malloc_thresholds_are_set_unless_the_environment_did(
    environment: dict[str, str], set_here: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MALLOC],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert (run.returncode, run.stdout.strip()) == (0, set_here)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:7405", "tcp://[::1]:1", "tcp://localhost:1", "ipc://a", "inproc://a"],
)
def test_events_on_this_machine_need_no_key(endpoint: str) -> None:
    check_events(endpoint, SecurityConfig())


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:7405", "tcp://0.0.0.0:1", "tcp://eth0:1", "tcp://host:1", "udp://127.0.0.1:1"],
)
def test_events_beyond_this_machine_need_a_key(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"missing: security\.curve_key"):
        check_events(endpoint, SecurityConfig())
    check_events(endpoint, SecurityConfig(allow_insecure=True))
    check_events(endpoint, SecurityConfig(curve_key="file"))
