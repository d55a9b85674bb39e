"""Ask a server the same prompts on each path, and once more those that a path seems to have changed."""

import math
import statistics
import uuid
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
from pydantic import Field

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.contract.exchange import Request
from vllm_qualify.evidence.likelihood import Tokenized, tokenize
from vllm_qualify.evidence.load.fitting import CACHE, block_tok
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.evidence.paths.asking import Asking
from vllm_qualify.evidence.paths.changes import Tolerance, find_changed, limit_nat
from vllm_qualify.evidence.paths.constrained import (
    BESIDE_FORM_TOK,
    LONGEST_FORM,
    Form,
    FormAsking,
    forms_of,
    probe_thinking,
    requests_of,
)
from vllm_qualify.evidence.paths.kinds import (
    BUSY_PATHS,
    CACHED,
    COLD,
    COLD_AGAIN,
    EVICTED,
    FILLER_REPLY_TOK,
    PAGES,
    REPLIES,
    Scene,
    salts_of,
)
from vllm_qualify.evidence.paths.replies import Content, Prompt, Reply, read_replies
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import AWAKE, CONSTRAINED, REORDERED
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.values import Frozen, Text

STAGE = "paths"
# Two more cold passes for the prompts that some path seems to have changed.
DOUBTED = ("doubted-1", "doubted-2")
# With it vLLM promises that a batch does not change its members' answers.
INVARIANT = "VLLM_BATCH_INVARIANT"
# The prompts whose tokens make up the other prompts, and tell how long prompts are.
FILLED_FROM = 16
# Of a prompt this many blocks of the KV cache should be whole, and so many tokens: 64 prompts of 192 have 768 blocks of 16, and
# show one corrupt block of 200 with 98 %. At most so many questions are put into one.
LEAST_BLOCKS, USUAL_BLOCK_TOK, LEAST_PROMPT_TOK, MOST_QUESTIONS = 3, 16, 192, 64


class How(Frozen):
    """What was decided on the server: the beginning of all salts, and how many questions each prompt has."""

    salt: Text
    questions_per_prompt: Annotated[int, Field(strict=True, ge=1, le=MOST_QUESTIONS)]
    asking: FormAsking


class Asker(NamedTuple):
    """What determines the requests of a cell: settings, prompts, the model's name and promises, the beginning of the salts."""

    settings: Paths
    prompts: Sequence[Prompt]
    model: str
    salt: str
    capabilities: Sequence[Capability] = ()
    asking: FormAsking = FormAsking()
    is_invariant: bool = False
    """whether a batch must not change its members' answers, to the letter"""
    sleeps: bool = False
    """whether the server can be put to sleep"""

    @property
    def taken(self) -> list[str]:
        return self.settings.taken(self.capabilities, sleeps=self.sleeps)

    @property
    def offered(self) -> list[str]:
        """The paths that could be taken."""
        taken = self.settings.model_copy(update={"leave_out": {}}).taken(self.capabilities, sleeps=self.sleeps)
        return [*taken, *([REORDERED] if "json_schema" in self.capabilities else [])]

    @property
    def forms(self) -> list[Form]:
        return forms_of(self.capabilities, self.settings.num_constrained)

    @property
    def requests(self) -> list[Request]:
        """Those whose replies must have a form."""
        return requests_of(self.forms, self.model, self.asking)

    def tolerance_for(self, path: str, limit: float) -> Tolerance:
        """How far a path's replies may be from cold ones, where noise is up to `limit` nat.

        Nobody promises that blocks of a cache are computed in one way, also of those that come back from elsewhere.
        """
        return Tolerance(limit, to_the_letter=self.is_invariant and path not in (CACHED, EVICTED, AWAKE))

    def read(self, folder: Path, path: str, prompts: Sequence[Prompt] | None = None) -> list[Reply]:
        """The replies of a path, to all prompts or to these. Raises one of UNUSABLE."""
        asked = self.prompts if prompts is None else prompts
        salts = salts_of(self.salt, path, asked)
        return read_replies(folder / path / REPLIES, asked, salts, self.model, self.settings.reply_tok)

    def read_colds(self, folder: Path) -> list[list[Reply]]:
        """The two cold passes. Raises one of UNUSABLE."""
        return [self.read(folder, COLD), self.read(folder, COLD_AGAIN)]

    def find_doubted(self, folder: Path) -> list[int]:
        """The prompts, by their places, of which a path's reply is far from both cold ones. Unusable paths are left out.

        So is `awake`: a server that was woken up with other weights would say the same once more.
        """
        colds = self.read_colds(folder)
        limit, doubted = limit_nat(*colds), set[int]()
        for path in self.taken:
            if path not in (COLD, CONSTRAINED, AWAKE):
                try:
                    doubted |= {*find_changed(self.read(folder, path), colds, self.tolerance_for(path, limit))}
                except UNUSABLE:
                    continue
        return sorted(doubted)


def measure_paths(server: Server, asker: Asker, at_once: int, folder: Path, tell: Tell) -> None:
    """Take each path, each into a folder of its own. Raises HostError, or ReleaseError if the server has ended."""
    settings, prompts = asker.settings, asker.prompts
    asking = Asking(server, at_once, settings.time_limit_s, settings.reply_tok)
    filler, cache_tok = _make_filler(server, asker), _cache_tok(server.metrics_page())
    scene = Scene(asking, settings, prompts, asker.salt, filler, cache_tok, asker.requests)
    paths = [COLD, COLD_AGAIN, *asker.taken[1:]]
    for path in paths:
        if path == AWAKE:
            _ask_doubted(asker, asking, folder)
        tell(f"{STAGE}: {len(scene.requests if path == CONSTRAINED else prompts)} prompts, {path}")
        inside = folder / path
        inside.mkdir()
        (inside / PAGES[0]).write_text(server.metrics_page())
        BUSY_PATHS[path].take(scene, inside)
        (inside / PAGES[1]).write_text(server.metrics_page())
    if AWAKE not in paths:
        _ask_doubted(asker, asking, folder)


def _ask_doubted(asker: Asker, asking: Asking, folder: Path) -> None:
    """Ask the prompts once more that some path seems to have changed. Raises ReleaseError if the server has ended."""
    try:
        doubted = [asker.prompts[at] for at in asker.find_doubted(folder)]
    except UNUSABLE:
        # The measurements will say so.
        return
    for again in DOUBTED if doubted else ():
        (folder / again).mkdir()
        asking.ask_prompts(doubted, salts_of(asker.salt, again, doubted), folder / again / REPLIES)


def decide_how(server: Server, contents: Sequence[Content], settings: Paths, *, has_forms: bool) -> How:
    """Ask enough questions in each prompt that it fills some blocks of the cache. Raises as `_tokenize_all`."""
    replies = _tokenize_all(server, contents[:FILLED_FROM], settings.time_limit_s)
    typical_tok = max(1.0, statistics.median(len(reply.tokens) for reply in replies))
    whole_tok = LEAST_BLOCKS * (block_tok(server.metrics_page()) or USUAL_BLOCK_TOK)
    wanted_tok = min(max(whole_tok, LEAST_PROMPT_TOK), replies[0].max_model_len / 2)
    per_prompt = min(MOST_QUESTIONS, max(1, math.ceil(wanted_tok / typical_tok)))
    asking = decide_asking(server, settings) if has_forms else FormAsking()
    return How(salt=uuid.uuid4().hex, questions_per_prompt=per_prompt, asking=asking)


def decide_asking(server: Server, settings: Paths) -> FormAsking:
    """Without thoughts a reply has few more tokens than its form: a model that writes blanks without end is cut early.

    Raises as `_tokenize_all`.
    """
    (longest,) = _tokenize_all(server, [LONGEST_FORM], settings.time_limit_s)
    room_tok = max(1, longest.max_model_len // 2)
    most_tok = min(settings.most_form_tok, room_tok)
    told, thinks = probe_thinking(server, settings.time_limit_s)
    if thinks:
        return FormAsking(thinking_tok=most_tok, brief_tok=most_tok, told=told, thinks=True)
    brief_tok = min(len(longest.tokens) + BESIDE_FORM_TOK, most_tok)
    return FormAsking(thinking_tok=most_tok, brief_tok=brief_tok, told=told)


def _make_filler(server: Server, asker: Asker) -> list[int]:
    """The tokens of another prompt: those of the prompts, over and over, as many as the settings say and the server takes.

    Raises as `_tokenize_all`.
    """
    contents = [prompt.content for prompt in asker.prompts[:FILLED_FROM]]
    replies = _tokenize_all(server, contents, asker.settings.time_limit_s)
    tokens = list(chain.from_iterable(reply.tokens for reply in replies))
    room = replies[0].max_model_len - 4 * FILLER_REPLY_TOK - 1
    return list(islice(cycle(tokens), max(1, min(asker.settings.filler_tok, room))))


def _tokenize_all(server: Server, contents: Sequence[Content], limit_s: float) -> list[Tokenized]:
    """Raises HostError if the server gives no tokens, ReleaseError if it has ended."""
    requests = ({"prompt": content} if isinstance(content, str) else {"messages": content} for content in contents)
    try:
        return [tokenize(server, request, limit_s) for request in requests]
    except (httpx.HTTPError, ValueError) as error:
        server.check_alive()
        problem = f"the server does not say the tokens of a prompt: {type(error).__name__}: {error}"[:500]
        raise HostError(problem, "see its log, or leave 'paths' out of the profile", STAGE) from error


def _cache_tok(page: str) -> int | None:
    """How many tokens the KV cache holds, by the server's /metrics. None if it does not say so."""
    try:
        infos = [sample.labels for sample in samples_of(page, lambda line: line.startswith(CACHE)) if sample.name == CACHE]
        return max((int(info["num_gpu_blocks"]) * int(info["block_size"]) for info in infos), default=None)
    except (ValueError, KeyError):
        return None
