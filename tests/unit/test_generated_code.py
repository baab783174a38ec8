"""Generated code is what its sources generate, byte by byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.local.patience import patient

ROOT = Path(__file__).parents[2]


def test_generated_code_equals_what_proto_generates(tmp_path: Path) -> None:
    protos = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "proto/paceline/v1").glob("*.proto")
    )
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=patient(60))
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "paceline/v1").iterdir()}
    committed = {
        path.name: path.read_bytes()
        for path in (ROOT / "libs/paceline/v1").glob("*_pb2*")
        if path.is_file()
    }
    assert set(fresh) == set(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []
