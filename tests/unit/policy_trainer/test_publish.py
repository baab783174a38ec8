"""The weights that ranks publish and push, and served weights that a restarted trainer takes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integration.weight_receivers import P, Recorder
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from unit.policy_trainer import publishing_ranks
from unit.policy_trainer.publishing_ranks import PIECE
from whole_versions import build_manifest

from paceline.config import SecurityConfig
from paceline.errors import DataLoss, ResourceExhausted
from paceline.local.patience import patient
from paceline.models.adapters import read_version
from paceline.rpc import EpochGuard, Server
from paceline.services.policy_trainer import publish
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.weights import EMBEDDING, HEAD
from paceline.services.policy_trainer.publish import check_same_model
from paceline.tensors import ADAPTERS, DOCUMENTS, NamedTensor, decode_safetensors, head_hash
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.weights_pb2 import Manifest
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME, Spool, WeightServicer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 rows are no multiple of 2 or 3, and more than a piece."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.few(2)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_what_is_published_and_exported_is_the_whole_state_and_no_rank_holds_more_than_a_piece(
    model_dir: Path, tmp_path: Path, ranks: int, dtype: str
) -> None:
    run_ranks(publishing_ranks.main, ranks, tmp_path, model_dir, tmp_path, {"publish_dtype": dtype})
    full = load_file(tmp_path / "full.safetensors")
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    assert any(not torch.equal(one, start[name]) for name, one in full.items())
    exported = load_file(tmp_path / "checkpoints/checkpoint-1/model.safetensors")
    assert list(exported) == sorted(full)
    for name, one in full.items():
        published = b"".join((tmp_path / f"{name}.{rank}").read_bytes() for rank in range(ranks))
        assert published == bits(one.to(getattr(torch, dtype))), name
        assert bits(exported[name]) == bits(one), name
    held = json.loads((tmp_path / "held.json").read_text())
    assert max(publishing for publishing, _ in held) <= 2 * PIECE  # fp32 rows and rows in transit
    largest = max(one.nbytes for one in full.values())
    assert held[0][1] <= 2 * largest  # one tensor, and the next while it is let go
    assert sum(one.nbytes for one in full.values()) > 4 * largest


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "stored", "dtype"),
    [(1, "bfloat16", "float32"), (2, "float32", "bfloat16"), (3, "bfloat16", "float32")],
)
def test_adapters_published_alone_are_over_their_start_what_is_trained(
    model_dir: Path, tmp_path: Path, ranks: int, stored: str, dtype: str
) -> None:
    start = tmp_path / "start"
    LlamaForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, stored)).save_pretrained(start)
    run_ranks(publishing_ranks.adapted, ranks, tmp_path, start, tmp_path, dtype)
    policy, head = (
        Manifest.FromString((tmp_path / f"{part}.manifest").read_bytes())
        for part in ("policy", "head")
    )

    def whole(part: str, name: str) -> bytes:
        return b"".join((tmp_path / f"{part}.{name}.{r}").read_bytes() for r in range(ranks))

    version = tmp_path / "version"
    version.mkdir()
    tensors = {
        one.name: torch.frombuffer(
            bytearray(whole("policy", one.name)), dtype=getattr(torch, dtype)
        ).view(*one.shape)
        for one in policy.tensors
    }
    save_file(tensors, version / "model.safetensors")
    (version / DOCUMENTS[ADAPTERS]).write_text(policy.metadata[ADAPTERS], encoding="utf-8")
    assert all("lora" in name for name in tensors)
    found, full = read_version(version, start), load_file(tmp_path / "full.safetensors")
    assert found.keys() == full.keys()
    close = 1e-6 if dtype == "float32" else 1e-3  # weights have moved by steps of 0.01
    for name, one in full.items():
        assert torch.allclose(found[name].float(), one, atol=close), name

    stored_head = load_file(start / "model.safetensors")[EMBEDDING]
    assert whole("head", EMBEDDING) == bits(stored_head)
    assert policy.lm_head_hash == head.lm_head_hash == head_hash(bits(stored_head))


@pytest.mark.slow
def test_an_export_says_in_transformers_what_was_trained(model_dir: Path, tmp_path: Path) -> None:
    run_ranks(publishing_ranks.main, 2, tmp_path, model_dir, tmp_path, {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/checkpoint-1")
    full = load_file(tmp_path / "full.safetensors")
    trained = LlamaForCausalLM.from_pretrained(model_dir)
    trained.load_state_dict(full, strict=False)
    ids = torch.arange(40)[None]
    shards = sorted((tmp_path / "checkpoints/checkpoint-1/shards").iterdir())
    assert [path.name for path in shards] == ["rank-0.safetensors", "rank-1.safetensors"]
    assert not any("/model/" in name for path in shards for name in load_file(path))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded(ids).logits, trained(ids).logits)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "bfloat16"), (3, "bfloat16"), (2, "float32")])
def test_weights_become_those_that_serve_and_keep_what_is_published_so(
    model_dir: Path, tmp_path: Path, ranks: int, dtype: str
) -> None:
    run_ranks(publishing_ranks.taking, ranks, tmp_path, model_dir, tmp_path, dtype)
    own, served, taken = (
        load_file(tmp_path / f"{name}.safetensors") for name in ("own", "served", "taken")
    )
    for name, one in taken.items():
        assert bits(one.to(served[name].dtype)) == bits(served[name]), name
        assert torch.equal(one[:-1][one[:-1] != 0], own[name][:-1][one[:-1] != 0]), name


def test_a_disk_without_room_is_told_on_all_ranks(model_dir: Path, tmp_path: Path) -> None:
    run_ranks(publishing_ranks.without_room, 2, tmp_path, model_dir, tmp_path)


@pytest.fixture
def spools(tmp_path: Path) -> Iterator[dict[int, tuple[Spool, str]]]:
    """The spools of the gateway and of the drafter trainer with their addresses; each is behind
    gRPC in its own thread.
    """
    held: dict[int, tuple[Spool, str]] = {}
    listening, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        servers = []
        for target in (P, WEIGHT_TARGET_POLICY_HEAD):
            spool = Spool(tmp_path / f"spool-{target}")
            guard = EpochGuard(SecurityConfig())
            servicer = WeightServicer(spool, guard, Recorder(), targets=(target,))
            servers.append(Server("127.0.0.1:0", SecurityConfig()))
            servers[-1].add(add_WeightServiceServicer_to_server, servicer, SERVICE_NAME)
            held[target] = spool, f"127.0.0.1:{await servers[-1].start()}"
        listening.set()
        await asyncio.to_thread(ended.wait, patient(120))
        for server in servers:
            await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert listening.wait(patient(20))
    yield held
    ended.set()
    thread.join(patient(20))


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_spool_is_the_same_to_the_byte_however_many_ranks_have_pushed(
    model_dir: Path,
    tmp_path: Path,
    spools: dict[int, tuple[Spool, str]],
    ranks: int,
) -> None:
    (gateway, at), (drafter, head_at) = spools[P], spools[WEIGHT_TARGET_POLICY_HEAD]
    given = {
        "publish_dtype": "bfloat16",
        "addresses": {"gateway": at, "drafter_trainer": head_at},
    }
    spoil = {"rank": ranks - 1}
    run_ranks(publishing_ranks.pushing, ranks, tmp_path, model_dir, tmp_path, given, spoil)
    first, second, third = json.loads((tmp_path / "told.json").read_text())
    assert [first["encoding"], second["encoding"]] == ["full", "sparse_delta"]
    assert "not finite" in third["error"]
    for spool, target in ((gateway, P), (drafter, WEIGHT_TARGET_POLICY_HEAD)):
        assert spool.prepared == {(target, 1), (target, 2)}
        for version in (1, 2):
            spool.check(target, version)
            path = spool.path(target, version)
            content = decode_safetensors((path / "model.safetensors").read_bytes())
            held = spool.manifest(target, version)
            assert held is not None
            whole = build_manifest(
                target, version, [*content.values()], lm_head_hash=held.lm_head_hash
            )
            assert held == whole, "one sender would have announced it otherwise"
            alone = Spool(tmp_path / f"alone-{target}-{version}")
            alone.write(whole, b"".join(one.view for one in content.values()))
            assert files(alone.path(target, version)) == files(path)
            assert head_hash(content.get(HEAD, content[EMBEDDING]).view) == held.lm_head_hash
    content = decode_safetensors((gateway.path(P, 1) / "model.safetensors").read_bytes())
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    for name, tensor in content.items():
        assert bytes(tensor.view) == bits(start[name].to(torch.bfloat16)), name


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_weights_of_another_model_are_not_taken() -> None:
    own = NamedTensor("a", "F32", (4, 3), bytes(48))
    check_same_model([own.layout], [own])
    for other in (
        NamedTensor("a", "F32", (3, 4), bytes(48)),
        NamedTensor("b", "F32", (1,), bytes(4)),
    ):
        with pytest.raises(DataLoss, match="another model serves"):
            check_same_model([own.layout], [other])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_publication_that_finds_no_room_takes_that_of_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full = [], [True]

    def allocate(nbytes: int, directory: Path) -> memoryview:
        if full[0]:
            raise ResourceExhausted("no space left", seen=nbytes)
        return memoryview(bytearray(nbytes))

    def make_room() -> None:
        made.append(1)
        full[0] = False

    monkeypatch.setattr(publish, "room_for", allocate)
    config = PolicyTrainerConfig.model_validate({"run": {"dir": str(tmp_path)}})
    with pytest.raises(ResourceExhausted, match="no space left"):
        publish._room(8, config, None)
    assert len(publish._room(8, config, make_room)) == 8
    full[0] = True
    with pytest.raises(ResourceExhausted, match="no space left"):
        publish._room(8, config, lambda: made.append(2))
    assert made == [1, 2]
