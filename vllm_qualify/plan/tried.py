"""By what a release is known when its tries are counted."""

import hashlib
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from vllm_qualify.engine.environment import digest_of
from vllm_qualify.engine.hub import WEIGHTS
from vllm_qualify.engine.server import MODEL
from vllm_qualify.plan.cell import CellPlan

# What engines, transformers and tokenizers read of a model's folder. A file with another name changes no reply.
READ = (
    *(f"*{end}" for end in WEIGHTS),
    *("config.json", "generation_config.json", "*quant*_config.json", "*processor_config.json", "adapter_config.json"),
    *("*.index.json", "params.json", "modules.json", "*_bert_config.json", "configuration.json"),
    *(
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "*.model",
        "*.tiktoken",
        "tekken.json",
    ),
    *("chat_template*", "*.jinja", "*.py"),
)


def digest_tried(plan: CellPlan) -> str:
    """SHA-256, in hexadecimal, of the engine's digest and of the model's files, as far as an engine reads them.

    A release is tried again though its model got another name, a README or a licence. Without hashes of its files a model is
    known by its revision.
    """
    release = plan.cell.release
    of_the_hub = next((part.files for part in plan.server.parts if part.option == MODEL), {})
    read = {path: digest for path, digest in (release.files or of_the_hub).items() if _is_read(path)}
    model = digest_of(dict(sorted(read.items()))) if read else release.revision
    return hashlib.sha256(f"{model} {release.engine.digest}".encode()).hexdigest()


def _is_read(path: str) -> bool:
    return any(fnmatchcase(PurePosixPath(path).name, pattern) for pattern in READ)
