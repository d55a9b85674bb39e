"""How a model is served on one GPU type: its server, its profile, and the load that stands for its traffic."""

import math
from collections.abc import Iterator
from typing import Any

from vllm_qualify.recipe.drafting.memory import fit_server
from vllm_qualify.recipe.drafting.parts import Host, Model, ParserLine, Published
from vllm_qualify.recipe.drafting.traffic import CPU, SPARE_TOK, Slo, Traffic
from vllm_qualify.recipe.drafting.yaml_lines import Block, Entry, Item, Items
from vllm_qualify.recipe.metrics import least_prompts

PROFILE = "balanced"
TOOLS, REASONING, TEMPLATE = "tool-call-parser", "reasoning-parser", "chat-template"
# Compiling a large model alone can take more than half an hour.
STARTUP_S = 3600
CPU_CONTEXT_TOK, MOST_CPU_CACHE_GIB = 4096, 64
LEAST_SEQUENCES, LEAST_SEQUENCES_CPU = 64, 16
BACKEND: dict[str, Any] = {"backend": "xgrammar"}


class Section:
    """`gpus` is None if the model does not fit on this type, and `refusal` then says why."""

    def __init__(self, model: Model, host: Host, traffic: Traffic, slo: Slo, published: Published | None) -> None:
        self.model, self.host, self.slo, self.is_said = model, host, slo, traffic.is_said
        self.is_cpu = host.gpu_type == CPU
        self.published = published if published and host.gpu_type in published.servers else None
        self.published_server = dict(self.published.servers[host.gpu_type]) if self.published else {}
        self.traffic = traffic.complete(host.gpu_type, model.shape.context_tok)
        knows_memory = host.memory_gb is not None and not self.is_cpu
        self.fitted = fit_server(model.shape, model.weights_bytes, host.memory_gb or 0, self.traffic) if knows_memory else None
        self.gpus = self.fitted.gpus if self.fitted and not self.published else 1
        self.context_tok = self._choose_context()

    def entries(self) -> Iterator[Entry]:
        yield Entry("default_variant", self.model.shape.weights)
        yield Entry("server", Block(list(self._server())), f"as {self.published.source} publishes it" if self.published else "")
        if environment := self._environment():
            yield Entry("environment", Block(environment))
        if self.is_cpu:
            yield Entry("starts", 1, "a CPU starts slowly; a GPU's server is started again while its starts differ")
        else:
            yield Entry("startup_timeout_s", STARTUP_S, "to compile a large model can take long")
        yield Entry("profiles", Block([Entry(PROFILE, Block(list(self._profile())))]))

    @property
    def refusal(self) -> str:
        if self.fitted is None:
            return ""
        parts = f"{self.fitted.cache_gb:.3g} GB of KV cache for {self.traffic.at_once()} requests at once"
        weights = f"{self.fitted.weights_gb:.3g} GB of weights and " if self.fitted.weights_gb else ""
        heads = f" in a number that divides its {self.model.shape.heads} heads" if self.model.shape.heads else ""
        return f"{self.host.gpu_type}: {weights}{parts} do not fit into 1 to 8 GPUs of {self.host.memory_gb:g} GB{heads}"

    def promises(self, option: str) -> bool:
        """Whether its server has a parser that reads what the model writes, as far as one was tried."""
        line = self._line_of(option)
        if not self.published:
            return line.name is not None
        named = self.published_server.get(option)
        # Of another template than the model's own nothing was tried.
        is_untried = line.readers is None or TEMPLATE in self.published_server
        return named is not None and (is_untried or named in (line.readers or []))

    def _line_of(self, option: str) -> ParserLine:
        return self.model.tools if option == TOOLS else self.model.reasoning

    def _choose_context(self) -> int:
        named = self.published_server.get("max-model-len")
        if type(named) is int and named > 0:
            return named
        if self.is_cpu:
            return min(self.model.shape.context_tok, max(CPU_CONTEXT_TOK, _round_up(self.traffic.request_tok + SPARE_TOK)))
        return self.fitted.context_tok if self.fitted and not self.published else self.model.shape.context_tok

    # --- the server

    def _server(self) -> Iterator[Entry]:
        if self.published:
            yield from (Entry(name, value, self._explain_published(name)) for name, value in self.published_server.items())
            return
        yield Entry("max-model-len", self.context_tok, self._explain_context())
        if self.is_cpu:
            yield Entry("enforce-eager", True, "nothing is compiled, which takes a CPU minutes")
            # Quantized weights are computed in 16 bits alone.
            if not self.host.has_bf16 and not self.model.shape.is_quantized:
                yield Entry("dtype", "float32", "this CPU has no instructions for BF16, and is ten times as slow in it")
        else:
            yield Entry("tensor-parallel-size", self.gpus, self._explain_gpus())
        if self.model.shape.needs_code:
            yield Entry("trust-remote-code", True, f"{self.model.shape.needs_code}: read it, then give --allow-code")
        yield from self._parsers()

    def _explain_published(self, option: str) -> str:
        if option not in (TOOLS, REASONING):
            return ""
        line = self._line_of(option)
        if line.readers is None or TEMPLATE in self.published_server:
            return "not tried"
        reads = self.published_server[option] in line.readers
        return "tried: it reads what the chat template writes" if reads else f"but {line.why}"

    def _explain_context(self) -> str:
        shape = self.model.shape
        if self.context_tok == shape.context_tok:
            return shape.context_by
        room = "a CPU reads long prompts slowly" if self.is_cpu else "more does not fit beside the weights"
        return f"of {shape.context_tok:,} ({shape.context_by}): {room}"

    def _explain_gpus(self) -> str:
        if self.fitted is None:
            return f"nothing is known of the memory of {self.host.gpu_type}: name as many GPUs as the model needs"
        size = self.fitted.weights_gb
        weights = f"{size:.3g} GB of weights" if size else "weights, whose size nothing says,"
        cache = f"{self.fitted.cache_gb:.3g} GB of KV cache for {self.traffic.at_once()} requests"
        return f"{weights} and {cache}, on GPUs of {self.host.memory_gb:g} GB"

    def _parsers(self) -> Iterator[Entry]:
        tools, reasoning = self.model.tools, self.model.reasoning
        if tools.name:
            yield Entry("enable-auto-tool-choice", True)
            yield Entry(TOOLS, tools.name, tools.why)
            yield Entry("structured-outputs-config", BACKEND, "else the first reply with a form decides it for all others")
        if reasoning.name:
            yield Entry(REASONING, reasoning.name, reasoning.why)

    def _environment(self) -> list[Entry]:
        if self.published:
            return [Entry(name, value) for name, value in self.published.environments.get(self.host.gpu_type, {}).items()]
        if not self.is_cpu:
            return []
        cache = LEAST_SEQUENCES_CPU * self.model.shape.cache_bytes(self.context_tok)
        return [Entry("VLLM_CPU_KVCACHE_SPACE", str(min(MOST_CPU_CACHE_GIB, max(1, math.ceil(cache / 2**30)))), "GiB")]

    # --- its profile

    def _profile(self) -> Iterator[Entry]:
        if "max-num-seqs" not in self.published_server:
            least = LEAST_SEQUENCES_CPU if self.is_cpu else LEAST_SEQUENCES
            yield Entry("server", {"max-num-seqs": max(least, self.traffic.clients or 0)}, "requests at once")
        if self.is_cpu:
            yield Entry("paths", False, "a CPU takes too long for them; on GPUs they are asked by default (docs/paths.md)")
        most = max((least_prompts(name) for name in self.slo.limits_ms), default=1)
        load = self.traffic.load(self.host.gpu_type, most, self.model.weights_bytes)
        yield Entry("load", load, self._explain_load(is_counted="num_prompts" in load))
        if gates := self.slo.gates():
            yield Entry("gates", Items([Item(gate) for gate in gates]), "what you promise to clients")

    def _explain_load(self, *, is_counted: bool) -> str:
        said = "your traffic" if self.is_said else "a stand-in, not your traffic: write your own lengths, and clients or a rate"
        if not is_counted:
            return said
        return f"{said}. Raise num_prompts where the report says that a repeat was too short"


def _round_up(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()
