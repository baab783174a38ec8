"""The chaos harness: the seed fixes its faults, its proxy alters bytes as configured, and its judge
finds errors in a run's remains.
"""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import remains as remains_module
from benchmarks.chaos import verdict as verdict_module
from benchmarks.chaos.files import FileWatch, Keeper
from benchmarks.chaos.happenings import Happenings
from benchmarks.chaos.proxy import PUSH_BYTES, Proxy
from benchmarks.chaos.recovery import Run, judge_recoveries
from benchmarks.chaos.remains import Remains, logged_commands, read_remains, weights_hash
from benchmarks.chaos.schedule import KINDS, Action, deal
from benchmarks.chaos.starve import deaths, errors
from benchmarks.chaos.verdict import RunVerdict, digest, judge, judge_samples, unequal
from paceline.errors import DeadlineExceeded, InvalidInput
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.streams.entries import encode_trajectory
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

RUN = "paceline:{chaos}:"
STEPS, PROMPTS, SAMPLES = 3, 2, 2


# --- schedule -------------------------------------------------------------------------------------


def test_the_same_seed_deals_the_same_faults_and_another_seed_others() -> None:
    assert deal(7, 50) == deal(7, 50)
    assert deal(7, 50) != deal(8, 50)


def test_every_kind_comes_before_one_comes_again() -> None:
    dealt = deal(3, len(KINDS))
    assert {fault.kind.name for fault in dealt} == {kind.name for kind in KINDS}
    for fault in dealt:
        assert fault.trigger in fault.kind.triggers
        assert len(set(fault.targets)) == fault.kind.at_once


def test_without_a_disk_of_its_own_no_disk_is_filled() -> None:
    assert all(fault.kind.action is not Action.FILL for fault in deal(3, 200, own_disk=False))


def test_a_kind_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="kill everybody"):
        deal(0, 1, only=["kill everybody"])


# --- events ---------------------------------------------------------------------------------------


async def test_what_came_before_somebody_waits_for_it_is_found() -> None:
    seen = Happenings()
    seen.tell("push", "p1")
    found = await seen.first(lambda one: one.what == "push", 0.0, 5.0, "a push")
    assert found.detail == "p1"
    waiting = asyncio.create_task(
        seen.first(lambda one: one.what == "push", found.at_s + 1e-9, patient(5.0), "another")
    )
    await asyncio.sleep(0)
    seen.tell("policy")
    seen.tell("push", "p2")
    assert (await waiting).detail == "p2"
    with pytest.raises(DeadlineExceeded, match="a commit never came"):
        await seen.first(lambda one: one.what == "commit", 0.0, 0.01, "a commit")


async def test_files_that_go_again_are_kept(tmp_path: Path) -> None:
    watch, keeper = FileWatch(), Keeper(tmp_path / "kept")
    seen = asyncio.Event()

    def keep(path: Path) -> None:
        keeper.keep(path, "model.safetensors", "state.json", "absent.json")
        seen.set()

    watch.watch(tmp_path / "spool", keep)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "model.safetensors").write_bytes(safetensors(w=b"weights"))
    (fresh / "state.json").write_text("{}")
    fresh.rename(tmp_path / "spool" / "policy-1")
    async with asyncio.timeout(patient(5.0)):
        await seen.wait()
    watch.close()
    shutil.rmtree(tmp_path / "spool" / "policy-1")
    keeper.close()
    kept = tmp_path / "kept" / "policy-1@1"
    assert [path.name for path in kept.iterdir()] == ["state.json"]
    (tmp_path / "same").write_bytes(safetensors(w=b"weights"))
    hashes = json.loads((tmp_path / "kept" / "hashes.json").read_text())
    assert hashes == {"policy-1@1": weights_hash(tmp_path / "same")}


# --- proxy ----------------------------------------------------------------------------------------


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing(
    on_push: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[Proxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A proxy before an echo server, and one client."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.write(b"end")
        writer.close()

    here, there = (f"127.0.0.1:{port}" for port in free_ports(2))
    server = await asyncio.start_server(echo, "127.0.0.1", int(there.split(":")[1]))
    proxy = Proxy(here, there, on_push)
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(here.split(":")[1]))
    try:
        async with asyncio.timeout(patient(10.0)):
            yield proxy, reader, writer
    finally:
        writer.close()
        await proxy.close()
        server.close()


async def test_a_proxy_passes_bytes_on_and_late_ones_too() -> None:
    async with echoing() as (proxy, reader, writer):
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        delaying = asyncio.create_task(proxy.delay(0.05, patient(60.0)))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        writer.write(b"two")
        assert await reader.readexactly(3) == b"two"
        assert asyncio.get_running_loop().time() - began >= 0.1  # there and back
        delaying.cancel()


async def test_a_reset_reaches_the_client_as_one() -> None:
    async with echoing() as (proxy, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_half_closed_a_server_hears_no_more_and_is_still_heard() -> None:
    async with echoing() as (proxy, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        proxy.half_close()
        writer.write(b"two")
        assert await reader.read() == b"end"


async def test_one_byte_of_the_next_large_chunk_is_another() -> None:
    async with echoing() as (proxy, reader, writer):
        corrupting = asyncio.create_task(proxy.corrupt(patient(5.0)))
        await asyncio.sleep(0)
        writer.write(b"small")
        assert await reader.readexactly(5) == b"small"
        sent = bytes(1 << 15)
        writer.write(sent)
        got = await reader.readexactly(len(sent))
        assert sum(one != other for one, other in zip(sent, got, strict=True)) == 1
        await corrupting


async def test_a_push_is_told_once() -> None:
    pushes: list[None] = []
    async with echoing(lambda: pushes.append(None)) as (_, reader, writer):
        writer.write(bytes(3 * PUSH_BYTES))
        await reader.readexactly(3 * PUSH_BYTES)
        assert len(pushes) == 1


async def test_a_client_of_an_absent_server_is_turned_away() -> None:
    here, there = (f"127.0.0.1:{port}" for port in free_ports(2))
    proxy = Proxy(here, there)
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(here.split(":")[1]))
    async with asyncio.timeout(patient(5.0)):
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
    writer.close()
    await proxy.close()


# --- judge ----------------------------------------------------------------------------------------


def test_the_judge_imports_nothing_but_the_standard_library() -> None:
    for module in (remains_module, verdict_module):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
        names |= {
            each.name for one in ast.walk(tree) if isinstance(one, ast.Import) for each in one.names
        }
        others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
        assert others <= {"benchmarks.chaos.remains"}


def command(*words: bytes | str | int) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


def safetensors(**tensors: bytes) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def tokens_of(step: int, task: int, number: int) -> bytes:
    return struct.pack("<4i", step, task, number, 7)


def sample_commands(step: int, task: int, number: int, **changed: Any) -> list[bytes]:
    """Return the log's commands of one trained sample."""
    tokens = tokens_of(step, task, number)
    branch = f"{step}-{task}-{number}/0"
    record = {
        "step": step,
        "group_id": f"s{step}.t{task}",
        "task_index": task,
        "sample_index": number,
        "tokens_hash": digest(tokens),
        "final": True,
        **changed,
    }
    trajectory = Trajectory(
        key=BranchKey("chaos", f"{step}-{task}-{number}", "0"),
        step=step,
        task_id=f"t{task}",
        group_id=f"s{step}.t{task}",
        group_size=SAMPLES,
        task_index=task,
        sample_index=number,
        token_ids=struct.unpack("<4i", tokens),
        loss_mask=(0, 1, 1, 1),
        behavior_logprobs=(0.0, -1.0, -1.0, -1.0),
        version_spans=(VersionSpan(1, 4, changed.get("version", step)),),
        reward=1.0,
        seed=0,
        temperature=1.0,
    )
    fields, payload = encode_trajectory(trajectory)
    words: list[bytes | str] = ["p", payload]
    for name, value in fields.items():
        words += [name, value]
    return [
        command("HSET", f"{RUN}ledger", branch, json.dumps(record)),
        command("XADD", f"{RUN}trajectories", f"{step}-1", *words),
        command("HSET", f"{RUN}ledger:fates", branch, f"trained:{step}"),
    ]


def entry(event: str, data: dict[str, Any], step: int, record: object = None) -> bytes:
    line = [4, 1.0, event, data, step, "rollout", []] + ([record] if record else [])
    return command("XADD", f"{RUN}journal", "1-0", "entry", json.dumps(line))


def made(directory: Path, edit: Callable[[list[bytes]], None] = lambda log: None) -> Remains:
    """Return the remains of a run without faults; `edit` may change its log."""
    log = []
    for step in range(STEPS):
        log.append(entry("StepBegan", {"step": step}, step))
        for task in range(PROMPTS):
            for number in range(SAMPLES):
                log += sample_commands(step, task, number)
        versions = {"seq": step + 1, "policy": step + 1, "drafter": 0}
        log.append(entry("Committed", {"versions": versions}, step, {"step": step}))
    edit(log)
    (directory / "run" / "redis-durable").mkdir(parents=True)
    (directory / "run" / "redis-durable" / "appendonly.aof").write_bytes(b"".join(log))
    hashes = {}
    for version in range(1, STEPS + 1):
        for name in (f"policy-{version}@{version}", f"step-{version}@{version}"):
            kept = directory / "kept" / name
            kept.mkdir(parents=True)
            hashes[name] = f"hash of v{version}"
        batch = b"".join(
            tokens_of(version - 1, task, number)
            for task in range(PROMPTS)
            for number in range(SAMPLES)
        )
        trained = version * PROMPTS * SAMPLES
        facts = {"trajectories": PROMPTS * SAMPLES, "batch_hash": digest(batch)}
        progress = {"step": version - 1, "trajectories_trained": trained, "batch": facts}
        (kept / "state.json").write_text(json.dumps({"progress": progress}))
    (directory / "kept" / "hashes.json").write_text(json.dumps(hashes))
    return read_remains(directory, "chaos")


def judged(found: Remains, other: Remains | None = None) -> RunVerdict:
    return judge(found, STEPS, PROMPTS, SAMPLES, other)


def test_a_run_without_fault_is_found_whole_and_equal_to_itself(tmp_path: Path) -> None:
    found = made(tmp_path)
    verdict = judged(found, found)
    assert not verdict.broken, verdict
    assert (verdict.samples, verdict.trained, verdict.compared) == (12, 12, 12)
    assert (verdict.versions, verdict.not_comparable) == (3, 0)


def test_a_log_that_a_kill_has_torn_is_read_up_to_there(tmp_path: Path) -> None:
    whole = command("SET", "a", "1") + command("SET", "b", b"2\r\n3")
    for cut in range(1, len(command("SET", "c", "4"))):
        torn = whole + command("SET", "c", "4")[:-cut]
        (tmp_path / "appendonly.aof").write_bytes(torn)
        assert list(logged_commands(tmp_path)) == [[b"SET", b"a", b"1"], [b"SET", b"b", b"2\r\n3"]]


def test_a_log_that_was_rewritten_is_refused(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"REDIS0009")
    with pytest.raises(ValueError, match="was rewritten"):
        list(logged_commands(tmp_path))


def without(part: bytes) -> Callable[[list[bytes]], None]:
    def edit(log: list[bytes]) -> None:
        log[:] = [one for one in log if part not in one]

    return edit


def doubled(part: bytes) -> Callable[[list[bytes]], None]:
    def edit(log: list[bytes]) -> None:
        log += [one for one in log if part in one]

    return edit


@pytest.mark.parametrize(
    ("what", "edit"),
    [
        ("lost", without(b"1-0-1")),
        ("lost", without(b"trained:1")),
        ("duplicated", doubled(b"trajectories\r\n$3\r\n1-1")),
        ("duplicated", doubled(b"trained:2")),
        (
            "duplicated",
            lambda log: log.append(command("HSET", f"{RUN}ledger:fates", "0-0-0/0", "trained:2")),
        ),
        ("duplicated", lambda log: log.extend(sample_commands(7, 0, 0))),
        (
            "wrong_weights",
            lambda log: log.__setitem__(
                slice(1, 4), sample_commands(0, 0, 0, tokens_hash="another")
            ),
        ),
        (
            "wrong_weights",
            lambda log: log.__setitem__(slice(1, 4), sample_commands(0, 0, 0, version=1)),
        ),
        (
            "disordered",
            lambda log: log.append(
                entry("Committed", {"versions": {"seq": 3, "policy": 4, "drafter": 0}}, 3)
            ),
        ),
        (
            "disordered",
            lambda log: log.append(
                entry("Committed", {"versions": {"seq": 4, "policy": 2, "drafter": 0}}, 3)
            ),
        ),
        ("disordered", without(b'1, "rollout", [], {"step": 1}')),
    ],
)
def test_what_is_wrong_in_the_log_is_found(
    tmp_path: Path, what: str, edit: Callable[[list[bytes]], None]
) -> None:
    assert getattr(judged(made(tmp_path, edit)), what)


def test_a_dropped_sample_is_reported_with_its_reason(tmp_path: Path) -> None:
    def drop(log: list[bytes]) -> None:
        for n, one in enumerate(log):
            if b"1-0-1/0" in one and b"trained:1" in one:
                log[n] = command("HSET", f"{RUN}ledger:fates", "1-0-1/0", "dropped:stale")

    verdict = judged(made(tmp_path, drop))
    assert verdict.reported == {"dropped:stale": 1}
    assert verdict.trained == 11
    assert verdict.lost  # the checkpoint's batch has it nevertheless


def test_weights_that_are_not_those_of_the_checkpoint_are_found(tmp_path: Path) -> None:
    found = made(tmp_path)
    found.spooled[2] = [*found.spooled[2], "another hash"]
    assert judged(found).wrong_weights == ["p2 is not what its checkpoint holds"]
    del found.spooled[2]
    assert judged(found).wrong_weights == ["p2 served and never lay in the spool"]


def test_a_batch_that_was_learned_twice_is_found(tmp_path: Path) -> None:
    found = made(tmp_path)
    found.batches[3][-1]["trajectories_trained"] += PROMPTS * SAMPLES
    assert judged(found).duplicated == ["p3 has learned of 16 samples, not 12"]
    again = found.batches[2][-1]
    found.batches[2].append({**again, "batch": {**again["batch"], "batch_hash": "0"}})
    assert "checkpoints of p2 name several batches" in judged(found).duplicated


def test_tokens_are_compared_where_the_same_weights_served(tmp_path: Path) -> None:
    found, other = made(tmp_path / "a"), made(tmp_path / "b")
    other.branches["0-0-0/0"].tokens = b"other"
    other.branches["2-0-0/0"].tokens = b"other"
    assert len(judged(found, other).differing) == 2
    other.spooled[2] = ["another hash"]  # serves in step 2
    verdict = judged(found, other)
    assert len(verdict.differing) == 1
    assert (verdict.compared, verdict.not_comparable) == (8, 4)
    other.near_ties[0] = 1
    assert judged(found, other).compared == 4


def test_samples_with_other_tokens_rewards_or_fates_are_unequal(tmp_path: Path) -> None:
    found, other = made(tmp_path / "a"), made(tmp_path / "b")
    assert not judge_samples(found, STEPS, PROMPTS, SAMPLES).broken
    assert unequal(found, other) == []
    other.branches["0-0-0/0"].tokens = b"other"
    other.branches["1-0-0/0"].record["reward"] = 1.0
    other.branches["2-0-0/0"].fates.append("dropped:stale")
    del other.branches["2-0-1/0"]
    assert len(unequal(found, other)) == 4


def test_a_starved_run_is_judged_by_deaths_and_errors_and_not_by_alarms() -> None:
    lines = [
        "gateway healthy (pid 7)",
        "redis impaired: it does not answer within 1.5 s (pid 7)",
        "coordinator impaired: no progress for 31 s: coordinator waits (pid 7)",
        "gateway impaired: engine worker 1 was killed by SIGKILL (pid 7)",
        "redis died: was killed by SIGKILL, silent for 3 s (pid 7)",
    ]
    assert deaths("\n".join(lines)) == lines[3:]
    lines = [
        "2026-11-29T07:10:45Z [info     ] gate decision=kept",
        "2026-11-29T07:10:45Z [error    ] ranks lost",
        "Traceback (most recent call last):",
    ]
    assert errors("\n".join(lines)) == lines[1:]


def test_a_recovery_is_judged_by_its_seconds_and_by_all_faults_but_the_kill(tmp_path: Path) -> None:
    run = Run(tmp_path, tmp_path / "model")
    lines = [
        "policy_trainer impaired: rank 0 of policy_trainer.rank was killed by SIGKILL (pid 7)",
        "coordinator impaired: no progress for 31 s: coordinator waits (pid 7)",
        "policy_trainer recovered: its ranks work again after 9.1 s (pid 7)",
    ]
    for line in lines:
        run.happenings.tell("console", line)
    assert run.alarms() == lines[1:2]
    (logs := tmp_path / "run" / "logs").mkdir(parents=True)
    lost = "[error    ] ranks lost error='rank 0 of policy_trainer.rank was killed by SIGKILL'"
    (logs / "policy_trainer.log").write_text(f"{lost}\n[error    ] redis is away\n")
    assert run.errors() == ["[error    ] redis is away"]

    row = {
        "recovery s": 31.0,
        "load s": 9.0,
        "step s": 12.0,
        "status": 0,
        "alarms": [],
        "errors": [],
    }
    assert all(goal.met for goal in judge_recoveries([row]))
    late = row | {"recovery s": 31.2}
    assert [goal.met for goal in judge_recoveries([row, late])] == [False, True, True, True]
    wrong = row | {"status": 1, "alarms": lines[1:2], "errors": run.errors()}
    assert [goal.met for goal in judge_recoveries([row, wrong])] == [True, False, False, False]


def test_a_hash_of_weights_forgets_the_order_and_the_header(tmp_path: Path) -> None:
    names = []
    for number, data in enumerate((safetensors(a=b"1", b=b"22"), safetensors(b=b"22", a=b"1"))):
        path = tmp_path / str(number)
        path.write_bytes(data)
        names.append(weights_hash(path))
    assert names[0] == names[1]
    path.write_bytes(safetensors(a=b"12", b=b"2"))
    assert weights_hash(path) != names[0]
