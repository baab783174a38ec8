"""The shared sections: their defaults, their secrets."""

import pytest

from paceline.config import RedisConfig, SecurityConfig


def test_the_features_role_falls_back_to_the_durable_one() -> None:
    assert RedisConfig(durable_url="redis://a/0").features == "redis://a/0"
    assert (
        RedisConfig(durable_url="redis://a/0", features_url="redis://b/0").features == "redis://b/0"
    )


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("OTHER", "s3cret")
    assert SecurityConfig().token == ""
    assert SecurityConfig(token_env="OTHER").token == "s3cret"
    assert "s3cret" not in repr(SecurityConfig(token_env="OTHER"))
