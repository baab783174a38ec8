"""Token and TLS between a real server and real channels."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from certificates import authority

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, Unavailable
from paceline.local.patience import patient
from paceline.rpc import Server, channel, rpc_errors, wait_healthy, wait_ready
from paceline.v1.weights_pb2 import GetVersionsRequest, GetVersionsResponse
from paceline.v1.weights_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)


class Weights(WeightServiceServicer):  # type: ignore[misc]
    """Answers one method."""

    async def GetVersions(self, request: GetVersionsRequest, context: Any) -> GetVersionsResponse:
        return GetVersionsResponse(prepared_policy=[7])


@asynccontextmanager
async def serving(security: SecurityConfig, address: str = "127.0.0.1:0") -> AsyncIterator[int]:
    server = Server(address, security)
    server.add(add_WeightServiceServicer_to_server, Weights(), "paceline.v1.WeightService")
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def ask(address: str, security: SecurityConfig) -> list[int]:
    async with channel(address, security) as to:
        with rpc_errors():
            response = await WeightServiceStub(to).GetVersions(
                GetVersionsRequest(), timeout=patient(20)
            )
    return list(response.prepared_policy)


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> dict[str, SecurityConfig]:
    monkeypatch.setenv("RIGHT_TOKEN", "correct horse")
    monkeypatch.setenv("WRONG_TOKEN", "battery staple")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    return {
        name: SecurityConfig(token_env=f"{name.upper()}_TOKEN") for name in ("right", "wrong", "no")
    }


async def test_the_right_token_is_accepted(tokens: dict[str, SecurityConfig]) -> None:
    async with serving(tokens["right"]) as port:
        assert await ask(f"127.0.0.1:{port}", tokens["right"]) == [7]


@pytest.mark.parametrize(("given", "seen"), [("wrong", "a token"), ("no", "no token")])
async def test_a_wrong_or_missing_token_is_refused(
    tokens: dict[str, SecurityConfig], given: str, seen: str
) -> None:
    async with serving(tokens["right"]) as port:
        with pytest.raises(ConfigError) as caught:
            await ask(f"127.0.0.1:{port}", tokens[given])
        assert (caught.value.reason, caught.value.seen) == ("UNAUTHENTICATED", seen)
        async with channel(f"127.0.0.1:{port}", tokens[given]) as to:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await WeightServiceStub(to).Push(iter(()), timeout=patient(20))


async def test_health_answers_without_the_token(tokens: dict[str, SecurityConfig]) -> None:
    async with serving(tokens["right"]) as port:
        await wait_healthy(f"127.0.0.1:{port}", tokens["no"], patient(20))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    return authority(tmp_path_factory.mktemp("ours"), "ours", "RIGHT_TOKEN")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    return authority(tmp_path_factory.mktemp("theirs"), "theirs", "RIGHT_TOKEN")


@pytest.mark.usefixtures("tokens")
async def test_mutual_tls_with_the_token_is_accepted(ours: SecurityConfig) -> None:
    async with serving(ours) as port:
        assert await ask(f"localhost:{port}", ours) == [7]


@pytest.mark.usefixtures("tokens")
async def test_mutual_tls_and_token_open_an_address_beyond_loopback(ours: SecurityConfig) -> None:
    async with serving(ours, "0.0.0.0:0") as port:
        assert await ask(f"127.0.0.1:{port}", ours) == [7]


@pytest.mark.usefixtures("tokens")
async def test_a_client_without_a_certificate_of_ours_is_not_connected(
    ours: SecurityConfig, theirs: SecurityConfig
) -> None:
    anonymous = ours.model_copy(update={"tls_cert": "", "tls_key": ""})
    impostor = theirs.model_copy(update={"tls_ca": ours.tls_ca})
    plain = SecurityConfig(token_env="RIGHT_TOKEN")
    async with serving(ours) as port:
        for client in (anonymous, impostor, plain):
            with pytest.raises(Unavailable):
                await ask(f"localhost:{port}", client)


@pytest.mark.usefixtures("tokens")
async def test_a_server_of_another_authority_is_not_trusted(
    ours: SecurityConfig, theirs: SecurityConfig
) -> None:
    async with (
        serving(theirs.model_copy(update={"tls_ca": ""})) as port,
        channel(f"localhost:{port}", ours) as to,
    ):
        with pytest.raises(Unavailable):
            await wait_ready(to, 0.5)


@pytest.mark.usefixtures("tokens")
async def test_mutual_tls_still_demands_the_token(ours: SecurityConfig) -> None:
    async with serving(ours) as port:
        with pytest.raises(ConfigError, match="no token"):
            await ask(f"localhost:{port}", ours.model_copy(update={"token_env": "NO_TOKEN"}))


async def test_without_security_only_loopback_is_served_and_called() -> None:
    off = SecurityConfig(token_env="")
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(ConfigError, match="reachable from other machines"):
            Server(address, off)
        with pytest.raises(ConfigError, match="reachable from other machines"):
            channel(address, off)
    async with serving(off.model_copy(update={"allow_insecure": True}), "0.0.0.0:0") as port:
        assert await ask(f"127.0.0.1:{port}", off) == [7]


def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"security\.tls_key.*seen: /nowhere/key\.pem"):
        Server(
            "127.0.0.1:0", SecurityConfig(tls_cert="/nowhere/cert.pem", tls_key="/nowhere/key.pem")
        )
