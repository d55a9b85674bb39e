"""Lines of logs, as the software says them, and whose turn each names."""

import json
from pathlib import Path

from vllm_qualify.engine.failure.meanings import FailureClass, Turn

ASSERTED = """Traceback (most recent call last):
  File "/made/lib/vllm/worker.py", line 9, in made
    assert {what}
AssertionError
"""
NCCL = "made:1:1 [0] NCCL WARN "
# Each line, the class and turn on a bare host, and the turn where the server ran from an image.
SAID: list[tuple[str, FailureClass, Turn, Turn]] = [
    (
        ASSERTED.format(what="all(vocab_sizes[0] == vocab_size for vocab_size in vocab_sizes)"),
        "refused-configuration",
        "recipe",
        "recipe",
    ),
    (ASSERTED.format(what="logits.shape[-1] == vocab_size"), "engine-bug", "release", "release"),
    # The driver's libraries come from the host, also into a container.
    ("ImportError: /usr/lib/x86_64-linux-gnu/libcuda.so.1: file too short", "no-gpu", "host", "host"),
    ("OSError: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1: file too short", "no-gpu", "host", "host"),
    ("OSError: libnvidia-ml.so.1: cannot open shared object file: No such file or directory", "no-gpu", "host", "host"),
    # A host mounts its cache into a container.
    ("ImportError: /root/.cache/torch_extensions/made.so: undefined symbol: _ZN3c10made", "compile-cache", "host", "host"),
    ("OSError: /root/.cache/flashinfer/90a/made/made.so: undefined symbol: made", "compile-cache", "host", "host"),
    ("ImportError: /made/vllm/_C.abi3.so: undefined symbol: _ZN3c10made", "broken-installation", "host", "release"),
    ("RuntimeError: Version mismatch: The cluster was started with:", "broken-installation", "host", "host"),
    ("ImportError: /made/.triton/made.so: failed to map segment from shared object", "no-permission", "host", "host"),
    (
        "ImportError: /made/made.so: failed to map segment from shared object: Cannot allocate memory",
        "out-of-memory",
        "host",
        "host",
    ),
    ("LLVM ERROR: out of memory", "out-of-memory", "host", "host"),
    ("c++: fatal error: Killed signal terminated program cc1plus", "out-of-memory", "host", "host"),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "out-of-memory", "host", "host"),
    ("clang++: error: unable to execute command: Killed", "out-of-memory", "host", "host"),
    ("RuntimeError: CUDA error: invalid device context", "crashed", "release", "release"),
    (
        "RuntimeError: Artifact not found locally: made.cubin (looked at /made). FLASHINFER_NO_DOWNLOAD is set — refusing to "
        "download. This means flashinfer-cubin is missing this file.",
        "broken-installation",
        "host",
        "release",
    ),
    (
        "ValueError: VLLM_PORT 'tcp://192.0.2.1:8000' appears to be a URI. This may be caused by a Kubernetes service "
        "discovery issue,check the warning in: https://docs.vllm.ai/en/stable/serving/env_vars.html",
        "invalid-value",
        "host",
        "host",
    ),
    ("ValueError: invalid literal for int() with base 10: 'tcp://192.0.2.1:8000'", "invalid-value", "host", "host"),
    (
        "ValueError: When connecting to an existing cluster, num_cpus and num_gpus must not be provided.",
        "engine-bug",
        "release",
        "release",
    ),
    # A size stands before ">=" here, and no package.
    ("ValueError: the fused BT path needs threads >= 32 + tp", "engine-bug", "release", "release"),
    (
        "ValueError: DSpark requires num_speculative_tokens >= dspark_block_size (7); got 3. Smaller values produce incorrect "
        "output. Use num_speculative_tokens=7 or larger (e.g. 7).",
        "refused-configuration",
        "recipe",
        "recipe",
    ),
    ("ValueError: MiniMax-M3 AITER sparse PA requires head_dim == 128", "unsupported-backend", "recipe", "recipe"),
    ("RuntimeError: SM 120 requires CUDA >= 12.8", "broken-installation", "host", "release"),
    ("/opt/nvshmem/src/init.cu:1007: non-zero status: 7 nvshmem setup connections failed", "nccl-failure", "host", "host"),
    (f"{NCCL}Could not find real path of /sys/class/made", "nccl-failure", "host", "host"),
]
# Words of many programs, each with the class and the turn on a bare host.
LINES: list[tuple[str, FailureClass, Turn]] = [
    (line["said"], line["kind"], line["turn"])
    for line in json.loads((Path(__file__).parents[1] / "engine" / "lines.json").read_text())
]
