"""Makes certificates of a test's own authorities."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.config import SecurityConfig
from paceline.local.patience import patient

_HERE = ("127.0.0.1",)


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=patient(60)
    )


def authority(
    directory: Path, name: str, token_env: str, addresses: Sequence[str] = _HERE
) -> SecurityConfig:
    """An authority with one certificate, for localhost and the addresses; the token is read from
    `token_env`.
    """
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    root = [
        "-x509",
        "-days",
        "2",
        "-subj",
        f"/CN={name} root",
        "-keyout",
        f"{name}-ca.key",
        "-out",
        f"{name}-ca.pem",
    ]
    openssl(directory, "req", *key, *root)
    openssl(
        directory,
        "req",
        *key,
        "-subj",
        "/CN=localhost",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
    )
    names = ",".join(["DNS:localhost", *(f"IP:{address}" for address in addresses)])
    (directory / "ext").write_text(f"subjectAltName={names}")
    sign = [
        "-CA",
        f"{name}-ca.pem",
        "-CAkey",
        f"{name}-ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "ext",
    ]
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
    paths = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": f"{name}-ca.pem"}
    return SecurityConfig(
        token_env=token_env, **{key: str(directory / path) for key, path in paths.items()}
    )
