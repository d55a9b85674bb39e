"""Captured logs of servers that failed, and the failure that each shows. captured/README.md tells where each comes from."""

from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.failure.meanings import FailureClass, Turn

CAPTURED = Path(__file__).parents[1] / "engine" / "captured"
MADE = CAPTURED.with_name("made")
USAGE = End(exit_code=2)
FAILED = End(exit_code=1)
KILLED = End(exit_code=-9)
GIVEN_UP = End(exit_code=None, waited_s=300)


class Case(NamedTuple):
    log: str
    end: End
    kind: FailureClass
    turn: Turn
    retry: bool
    named: list[str]
    folder: Path = CAPTURED

    @property
    def text(self) -> str:
        return (self.folder / f"{self.log}.log").read_text()


CASES = [
    Case("unknown-flag-config", USAGE, "unknown-flag", "recipe", False, ["--no-such-flag"]),
    Case("unknown-flag-config-value", USAGE, "unknown-flag", "recipe", False, ["--kv-cache-dtypo"]),
    Case("unknown-flag-command-line", USAGE, "unknown-flag", "recipe", False, ["--no-such-flag"]),
    Case("invalid-value-number", USAGE, "invalid-value", "recipe", False, ["--max-num-seqs", "banana"]),
    Case("invalid-value-choice", USAGE, "invalid-value", "recipe", False, ["--dtype", "bfloat17"]),
    Case("invalid-value-json", USAGE, "invalid-value", "recipe", False, ["--compilation-config", "Invalid JSON"]),
    Case("invalid-value-unknown-field", USAGE, "invalid-value", "recipe", False, ["pass_config.enable_no_such_pass"]),
    Case("unknown-model-folder", FAILED, "unknown-model", "recipe", False, ["/models/missing"]),
    Case("unknown-model-hub", FAILED, "unknown-model", "recipe", False, ["acme/no-such-model"]),
    Case("unknown-revision", FAILED, "unknown-revision", "recipe", False, ["acme/tiny-1b", "deadbeef"]),
    Case("gated-model-no-token", FAILED, "gated-model", "hub", False, ["acme/gated-8b", "no account"]),
    Case("gated-model-not-listed", FAILED, "gated-model", "hub", False, ["acme/gated-8b", "not in its list"]),
    Case("hub-rate-limit", FAILED, "hub-rate-limit", "hub", True, ["acme/tiny-1b", "429"]),
    Case("hub-rate-limit-waiting", End(exit_code=None, waited_s=200), "hub-rate-limit", "hub", True, ["244.0 s", "429"]),
    Case("hub-rate-limit-older-client", FAILED, "hub-rate-limit", "hub", True, ["acme/tiny-1b", "429"]),
    Case("cuda-out-of-memory-weights", FAILED, "cuda-out-of-memory", "recipe", False, ["GPU 0", "512.00 MiB", "139.80 GiB"]),
    Case("cuda-out-of-memory-loading-h200", FAILED, "cuda-out-of-memory", "recipe", False, ["weights", "GPU 0", "160.00 MiB"]),
    Case("cuda-out-of-memory-fragmented", FAILED, "cuda-out-of-memory", "recipe", False, ["70.00 GiB", "13.99 GiB"]),
    Case("cuda-out-of-memory-fraction", FAILED, "cuda-out-of-memory", "recipe", False, ["1024.00 MiB", "126.29 GiB"]),
    Case("cuda-out-of-memory-shared", FAILED, "cuda-out-of-memory", "recipe", False, ["512.00 MiB", "499.56 MiB"]),
    Case("cuda-out-of-memory-capture", FAILED, "cuda-out-of-memory", "recipe", False, ["1024.00 MiB", "129.12 MiB"]),
    Case("cuda-out-of-memory-graphs", FAILED, "cuda-out-of-memory", "recipe", False, []),
    Case("cuda-out-of-memory-context", FAILED, "cuda-out-of-memory", "recipe", False, []),
    Case("cuda-out-of-memory-cublas", FAILED, "cuda-out-of-memory", "recipe", False, ["cuBLAS", "cublasCreate"]),
    Case("cuda-out-of-memory-in-nccl", FAILED, "cuda-out-of-memory", "recipe", False, ["NCCL"]),
    Case("cuda-out-of-memory-sampler", FAILED, "cuda-out-of-memory", "recipe", False, ["256 requests"]),
    Case("gpu-memory-in-use", FAILED, "gpu-memory-in-use", "host", True, ["7.34", "139.8", "0.92", "128.62"]),
    Case("kv-cache-too-small-without-estimate", FAILED, "kv-cache-too-small", "recipe", False, ["1000000", "2.38"]),
    Case("unsupported-quantization-fp8", FAILED, "unsupported-quantization", "recipe", False, ["fp8", "75", "70"]),
    Case("unsupported-quantization-awq", FAILED, "unsupported-quantization", "recipe", False, ["awq", "75", "70"]),
    Case("unsupported-quantization-scheme", FAILED, "unsupported-quantization", "recipe", False, ["scheme", "75", "70"]),
    Case("driver-too-old-warning", FAILED, "driver-too-old", "host", False, ["CUDA 12.8"]),
    Case("driver-too-old-error", FAILED, "driver-too-old", "host", False, ["CUDA 12.4"]),
    Case("driver-too-old-803", FAILED, "driver-too-old", "host", False, ["Error 803"]),
    Case("driver-too-old-803-warning", FAILED, "driver-too-old", "host", False, ["Error 803"]),
    Case("driver-too-old-804", FAILED, "driver-too-old", "host", False, ["Error 804"]),
    Case("driver-too-old-insufficient", FAILED, "driver-too-old", "host", False, ["insufficient"]),
    Case("no-gpu-802", FAILED, "no-gpu", "host", False, ["Error 802"]),
    Case("no-gpu-device-type", FAILED, "no-gpu", "host", False, ["Failed to infer device type"]),
    Case("no-gpu-driver", FAILED, "no-gpu", "host", False, ["Found no NVIDIA driver"]),
    Case("no-gpu-libcuda", FAILED, "no-gpu", "host", False, ["libcuda.so.1"]),
    Case("nccl-failure-cuda", FAILED, "nccl-failure", "host", False, ["unhandled cuda error"]),
    Case("nccl-failure-interface", FAILED, "nccl-failure", "host", False, ["no network interface"]),
    Case("nccl-failure-interface-vllm", FAILED, "nccl-failure", "host", False, ["invalid usage"]),
    Case("nccl-failure-remote", FAILED, "nccl-failure", "host", False, ["remote process exited"]),
    Case("nccl-failure-shared-memory", FAILED, "nccl-failure", "host", False, ["/dev/shm/nccl-6077IZ", "9637888"]),
    Case("nccl-failure-shared-memory-debug", FAILED, "nccl-failure", "host", False, ["/dev/shm/nccl-BtLPqf"]),
    Case("nccl-failure-watchdog", FAILED, "nccl-failure", "host", True, ["ALLREDUCE", "10017 ms"]),
    Case("nccl-failure-watchdog-killed", FAILED, "nccl-failure", "host", True, ["ALLREDUCE", "10010 ms"]),
    Case("out-of-memory-bad-alloc", FAILED, "out-of-memory", "host", False, ["std::bad_alloc"]),
    Case("out-of-memory-mapping", FAILED, "out-of-memory", "host", False, ["Errno 12"]),
    Case("killed-worker", End(exit_code=0), "killed", "host", True, ["VllmWorker-0", "without telling why"]),
    Case("killed-engine-starting", FAILED, "killed", "host", True, ["EngineCore", "signal 9 (SIGKILL)"]),
    Case("hung-waiting-for-engine", End(exit_code=None, waited_s=45), "hung", "release", False, ["Waiting for 1 local"]),
    Case("hub-unreachable-503", FAILED, "hub-unreachable", "hub", True, ["acme/tiny-1b", "503 Service Unavailable"]),
    Case("hub-unreachable-refused", FAILED, "hub-unreachable", "hub", True, ["Connection refused"]),
    Case("hub-unreachable-name", FAILED, "hub-unreachable", "hub", True, ["hub.invalid", "Name or service not known"]),
    Case("not-in-cache", FAILED, "not-in-cache", "host", False, ["HF_HUB_OFFLINE"]),
    Case("port-in-use", FAILED, "port-in-use", "host", True, ["Address already in use"]),
    Case("unsupported-architecture", FAILED, "unsupported-architecture", "release", False, ["NoSuchForCausalLM"]),
    Case("refused-configuration-length", FAILED, "refused-configuration", "recipe", False, ["4096", "2048"]),
    Case("cuda-out-of-memory-reading", FAILED, "cuda-out-of-memory", "recipe", False, ["10.00 GiB", "9.29 GiB", "139.80 GiB"]),
    Case("no-gpu-reading", FAILED, "no-gpu", "host", False, ["No CUDA GPUs"]),
    Case("nccl-failure-duplicate-gpu", FAILED, "nccl-failure", "host", False, ["rank 0", "rank 1"]),
    Case("gated-model-bad-token", FAILED, "gated-model", "hub", False, ["acme/tiny-1b", "401"]),
    Case("refused-configuration-heads", FAILED, "refused-configuration", "recipe", False, ["heads (4)", "parallel size (3)"]),
    Case("kv-cache-too-small-cpu", FAILED, "kv-cache-too-small", "recipe", False, ["1000000", "2.38", "1.0", "419200"]),
    Case("unsupported-quantization-bitsandbytes", FAILED, "unsupported-quantization", "recipe", False, ["bitsandbytes"]),
    Case("unsupported-quantization-no-such", FAILED, "unsupported-quantization", "recipe", False, ["nosuch"]),
    Case("incomplete-model-no-weights", FAILED, "incomplete-model", "release", False, ["/models/no-weights"]),
    Case("incomplete-model-broken-weights", FAILED, "incomplete-model", "release", False, ["incomplete metadata"]),
    Case("unknown-model-no-config", FAILED, "unknown-model", "recipe", False, ["/models/no-config"]),
    Case("kv-cache-too-small-none-left", FAILED, "kv-cache-too-small", "recipe", False, ["no memory"]),
    Case("out-of-memory-limit", FAILED, "out-of-memory", "host", False, ["1073479680"]),
    Case("out-of-memory-import", FAILED, "out-of-memory", "host", False, ["MemoryError"]),
    Case("out-of-memory-at-start", FAILED, "out-of-memory", "host", False, ["0.99"]),
    Case("broken-installation-libraries", FAILED, "broken-installation", "host", False, ["nvidia_cutlass_dsl", "libraries"]),
    Case("broken-installation-spawned-main", FAILED, "broken-installation", "host", False, ["whenever it is imported"]),
    Case("broken-installation-module", FAILED, "broken-installation", "host", False, ["No module named 'msgspec'"]),
    Case("broken-installation-shared-library", FAILED, "broken-installation", "host", False, ["libzmq"]),
    Case("no-compiler-c", FAILED, "no-compiler", "host", False, ["Permission denied: ''"]),
    Case("no-compiler-cpp", FAILED, "no-compiler", "host", False, ["No working C++ compiler", "g++"]),
    Case("too-few-gpus", FAILED, "too-few-gpus", "host", False, ["4 ranks", "2 GPUs"]),
    Case("unsupported-backend-attention", FAILED, "unsupported-backend", "recipe", False, ["CUTLASS_MLA", "capability"]),
    Case("unsupported-backend-moe", FAILED, "unsupported-backend", "recipe", False, ["FP8", "FLASHINFER_TRTLLM", "device"]),
    Case("invalid-value-attention-backend", FAILED, "invalid-value", "recipe", False, ["FLASHY"]),
    Case("refused-configuration-quantization", FAILED, "refused-configuration", "recipe", False, ["awq"]),
    Case("gpu-memory-in-use-given-back", FAILED, "gpu-memory-in-use", "host", True, ["89.76", "90.46"]),
    Case("gpu-memory-in-use-h200", FAILED, "gpu-memory-in-use", "host", True, ["100.89", "139.8", "0.95", "132.81"]),
    Case("kv-cache-too-small-none-left-gpu", FAILED, "kv-cache-too-small", "recipe", False, ["no memory"]),
    Case("kv-cache-too-small-gpu", FAILED, "kv-cache-too-small", "recipe", False, ["131072", "16.0", "6.04", "49440"]),
    Case("no-compiler-nvcc", FAILED, "no-compiler", "host", False, ["/nowhere/bin/nvcc"]),
    Case("killed-engine-h200", End(exit_code=0), "killed", "host", True, ["engine core"]),
    Case("port-in-use-h200", FAILED, "port-in-use", "host", True, ["Address already in use"]),
    Case("killed", KILLED, "killed", "host", True, ["signal 9 (SIGKILL)"]),
    Case("killed-engine", End(exit_code=0), "killed", "host", True, ["engine core"]),
    Case("killed-terminated", End(exit_code=0), "killed", "host", True, ["stopped from outside"]),
    Case("crashed", End(exit_code=-11), "crashed", "release", False, ["SIGSEGV"]),
    Case("crashed-engine", End(exit_code=0), "crashed", "release", False, ["SIGSEGV"]),
    Case("hung", End(exit_code=None, waited_s=45), "hung", "release", False, ["45 s"]),
    Case("hung-engine-stopped", End(exit_code=None, waited_s=120), "hung", "release", False, ["120 s"]),
    Case("weights-do-not-fit", FAILED, "weights-do-not-fit", "release", False, ["layers.0.mlp.down_proj.weight"]),
    Case("unsupported-backend-first-completion", End(exit_code=0), "unsupported-backend", "recipe", False, ["head_dim=16"]),
]
# Kinds that could not be captured here: made/README.md tells where their words come from.
MADE_CASES = [
    Case("bfloat16-capability", FAILED, "refused-configuration", "recipe", False, ["Tesla T4", "8.0"], MADE),
    Case("block-n-tp", FAILED, "refused-configuration", "recipe", False, ["block_n = 128"], MADE),
    Case("chat-template-missing", FAILED, "invalid-value", "recipe", False, ["/made/nope.jinja"], MADE),
    Case("compile-cache-corrupted", FAILED, "compile-cache", "host", True, ["corrupted"], MADE),
    Case("cpu-kv-space", FAILED, "out-of-memory", "host", False, ["14.68", "23.54", "64.0"], MADE),
    Case("cudagraph-shapes-spec", FAILED, "refused-configuration", "recipe", False, ["3", "4"], MADE),
    Case("deepgemm-exit-code", FAILED, "no-compiler", "host", False, ["cuobjdump"], MADE),
    Case("deepgemm-nvcc", FAILED, "no-compiler", "host", False, ["NVCC compilation failed"], MADE),
    Case("device-kernel-image-invalid", FAILED, "unsupported-gpu", "release", False, ["device kernel image is invalid"], MADE),
    Case("device-side-assert", End(exit_code=0), "crashed", "release", False, ["device-side assert"], MADE),
    Case("dist-network-timeout", FAILED, "rendezvous", "host", True, ["192.0.2.9"], MADE),
    Case("ecc", FAILED, "gpu-broken", "host", False, ["ECC"], MADE),
    Case("flashinfer-cubin-version-inspected", FAILED, "broken-installation", "host", False, ["0.6.13", "0.6.14"], MADE),
    Case("flashinfer-cubin-version", FAILED, "broken-installation", "host", False, ["0.6.13", "0.6.14"], MADE),
    Case("flashinfer-nvcc-unknown-option", FAILED, "no-compiler", "host", False, ["-static-global-template-stub=false"], MADE),
    Case("flashinfer-sinks", FAILED, "unsupported-backend", "recipe", False, ["attention sinks"], MADE),
    Case("fp4-gemm-runner", FAILED, "unsupported-quantization", "recipe", False, ["FP4"], MADE),
    Case("gloo-full-mesh", FAILED, "rendezvous", "host", True, ["Gloo"], MADE),
    Case("hf-read-timeout", FAILED, "hub-unreachable", "hub", True, ["cdn-lfs.hf.co"], MADE),
    Case("input-size-tp", FAILED, "refused-configuration", "recipe", False, ["input"], MADE),
    Case("lora-unsupported-weight", FAILED, "refused-configuration", "recipe", False, ["lm_head"], MADE),
    Case("mamba-blocks", FAILED, "kv-cache-too-small", "recipe", False, ["1024", "614"], MADE),
    Case("no-hip-gpus", FAILED, "no-gpu", "host", False, ["HIP"], MADE),
    Case("no-mxfp4-moe-backend", FAILED, "unsupported-backend", "recipe", False, ["MXFP4"], MADE),
    Case("no-nvfp4-moe-backend", FAILED, "unsupported-backend", "recipe", False, ["NvFp4"], MADE),
    Case("op-namespace", FAILED, "broken-installation", "host", False, ["_C", "silu_and_mul"], MADE),
    Case("pp-not-supported", FAILED, "refused-configuration", "recipe", False, ["pipeline"], MADE),
    Case("ptxas-sm121a", FAILED, "unsupported-gpu", "release", False, ["sm_121a"], MADE),
    Case("ray-placement-waiting", End(exit_code=None, waited_s=600), "too-few-gpus", "host", False, ["150 s"], MADE),
    Case("rpc-timeout", End(exit_code=0), "nccl-failure", "host", True, ["sample_tokens"], MADE),
    Case("sinks-flash-attention-3", FAILED, "unsupported-backend", "recipe", False, ["FlashAttention 3"], MADE),
    Case("survived-429-then-oom", FAILED, "cuda-out-of-memory", "recipe", False, ["80.00 MiB"], MADE),
    Case("threads-limit", End(exit_code=-6), "process-limit", "host", False, ["pthread_create"], MADE),
    Case("tokenizers-backend", FAILED, "unsupported-architecture", "release", False, ["TokenizersBackend"], MADE),
    Case("transformers-model-type", FAILED, "unsupported-architecture", "release", False, ["qwen9_vl"], MADE),
    Case("triton-cache-permission", FAILED, "no-permission", "host", False, ["Permission denied"], MADE),
    Case("triton-kernels-noise-then-archs", FAILED, "unsupported-gpu", "release", False, ["no kernel image"], MADE),
    Case("trtllm-nccl-usage", FAILED, "nccl-failure", "host", False, ["invalid usage"], MADE),
    Case("weights-keyerror", FAILED, "weights-do-not-fit", "release", False, ["layers.0.mlp.experts.w13_bias"], MADE),
    Case("weights-not-initialized", FAILED, "weights-do-not-fit", "release", False, ["shared_experts"], MADE),
    Case("xet-cas", FAILED, "hub-unreachable", "hub", True, ["CAS service error"], MADE),
]
