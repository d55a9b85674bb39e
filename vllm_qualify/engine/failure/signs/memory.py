"""Signs of memory that ran out, of GPUs and of the host."""

from vllm_qualify.engine.failure.signs.sign import NEXT_LINES, line_up_to, make_sign

_KV_CACHE_NEEDED = (
    r"max seq len \((?P<asked>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, "
    r"which is larger than the available KV cache memory \((?P<available>[\d.]+) GiB\)"
)
# vLLM's words for GPU and CPU: the memory that was free at the start, and the share of all memory that it wants.
_FREE = r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired"
_SHARE = r"memory utilization \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
_ALLOCATION = (
    r"Tried to allocate (?P<asked>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total capacity of "
    r"(?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)

SIGNS = [
    make_sign(
        "kv-cache-too-small",
        rf"{_KV_CACHE_NEEDED}\. Based on the available memory, the estimated maximum model length is (?P<fits>\d+)",
        "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left; {fits} tokens would fit",
        "set max-model-len to {fits} or less, raise gpu-memory-utilization, or use more GPUs",
    ),
    make_sign(
        "kv-cache-too-small", _KV_CACHE_NEEDED, "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left"
    ),
    # Older versions.
    make_sign(
        "kv-cache-too-small",
        r"max seq len \((?P<asked>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
        r"\((?P<fits>\d+)\)",
        "max-model-len {asked} needs more KV cache than is left; {fits} tokens would fit",
        "set max-model-len to {fits} or less, raise gpu-memory-utilization, or use more GPUs",
    ),
    make_sign(
        "kv-cache-too-small",
        r"No available memory for the cache blocks",
        "the model leaves no memory for the KV cache",
        "raise gpu-memory-utilization, lower max-num-batched-tokens, or use more GPUs",
    ),
    make_sign(
        "gpu-memory-in-use",
        rf"Free memory on device(?: \S+)? {_FREE} GPU {_SHARE}",
        "{free} of {total} GiB of the GPU's memory were free at the start, gpu-memory-utilization {share} asks for {asked} GiB",
    ),
    make_sign(
        "gpu-memory-in-use",
        r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<after>[\d.]+) GiB",
        "another process gave memory of the GPU back while the server measured it: {before} GiB were free, then {after} GiB",
    ),
    make_sign(
        "out-of-memory",
        rf"Available memory on node \d+ {_FREE} CPU {_SHARE}",
        "{free} of {total} GiB of the host's memory were free, gpu-memory-utilization {share} asks for {asked} GiB",
        "stop what else uses the host's memory; or lower gpu-memory-utilization, which on the CPU means the host's memory",
    ),
    # vLLM's own message follows the allocator's.
    make_sign(
        "cuda-out-of-memory",
        rf"{line_up_to('out of memory')}(?:[^\n]*\n){{1,60}}?[^\n]*?"
        r"(?P<telling>CUDA out of memory occurred when warming up sampler with (?P<requests>\d+) dummy requests)",
        "the GPU ran out of memory when the sampler was warmed up with {requests} requests",
        "lower max-num-seqs or gpu-memory-utilization",
        needs=("warming up sampler",),
    ),
    # No setting of the KV cache helps here.
    make_sign(
        "cuda-out-of-memory",
        rf"(?:CUDA|HIP) out of memory\. {_ALLOCATION}",
        "the weights do not fit: GPU {gpu} ran out of memory while they were loaded: {asked} asked for, {free} of {total} free",
        "use more GPUs (tensor-parallel-size), a variant with smaller weights, or GPUs with more memory",
        through="/model_executor/model_loader/",
    ),
    make_sign(
        "cuda-out-of-memory",
        rf"(?:CUDA|HIP) out of memory\. {_ALLOCATION}",
        "GPU {gpu} ran out of memory: {asked} asked for, {free} of {total} free",
    ),
    # NCCL noticed it, but is not the cause.
    make_sign(
        "cuda-out-of-memory",
        rf"{line_up_to('NCCL error')}{NEXT_LINES}(?P<telling>Cuda failure(?: \d+)? 'out of memory')",
        "the GPU ran out of memory in NCCL",
        needs=("Cuda failure",),
    ),
    make_sign(
        "cuda-out-of-memory",
        r"(?:CUDA|HIP|XPU|NPU)(?: error:)? out of memory|torch\.OutOfMemoryError|hipErrorOutOfMemory"
        r"|UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|RESOURCE_EXHAUSTED: [^\n]{0,100}(?:memory|alloc|hbm)[^\n]{0,100}",
        "the GPU ran out of memory",
        needs=("out of memory", "OutOfMemory", "UR_RESULT_ERROR_OUT_OF", "RESOURCE_EXHAUSTED"),
    ),
    make_sign(
        "cuda-out-of-memory",
        r"CUBLAS_STATUS_ALLOC_FAILED when calling `(?P<call>\w+)",
        "the GPU ran out of memory in cuBLAS ({call})",
    ),
    make_sign(
        "out-of-memory",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<size>\d+) bytes",
        "the host's memory ran out: {size} bytes asked for",
    ),
    make_sign(
        "out-of-memory",
        r"^MemoryError.*|std::bad_alloc|\[Errno 12\] Cannot allocate memory|shared object: Cannot allocate memory"
        r"|LLVM ERROR: out of memory[^\n]{0,60}",
        "the host's memory ran out: {whole}",
        needs=("MemoryError", "bad_alloc", "Cannot allocate memory", "LLVM ERROR"),
    ),
    make_sign(
        "out-of-memory",
        r"Task was killed due to the node running low on memory|The node was low on resource: memory|OOMKilled",
        "the host's or the container's memory ran out: {whole}",
    ),
    # The kernel's OOM killer ends a compiler; the words are those of gcc, clang and nvcc.
    make_sign(
        "out-of-memory",
        r"Killed signal terminated program \w{1,40}|unable to execute command: Killed"
        r"|'\w{1,40}' died due to signal 9\b[^\n]{0,40}",
        "the host's memory ran out, and a compiler was killed: {whole}",
        "raise the container's or the host's memory, or set MAX_JOBS to a lower number: each job is a compiler",
    ),
    make_sign(
        "kv-cache-too-small",
        r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<has>\d+)\)",
        "max-num-seqs {asked} needs as many Mamba cache blocks, {has} are left",
        "set max-num-seqs to {has} or less, or raise gpu-memory-utilization",
    ),
    make_sign(
        "out-of-memory",
        r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less than "
        r"requested "
        r"memory for kv \((?P<asked>[\d./]+) GiB\)",
        "{free} of {total} GiB of the host's memory were free, the KV cache asks for {asked} GiB",
        "lower VLLM_CPU_KVCACHE_SPACE or kv-cache-memory-bytes, or stop what else uses the host's memory",
    ),
    make_sign(
        "out-of-memory",
        r"(?P<what>insufficient shared memory(?: \(shm\))?|are out of shared memory"
        r"|unable to write to file </torch_[^\n]{0,100}|unable to (?:open|allocate|mmap) shared memory[^\n]{0,100}"
        r"|No space left on device[^\n]{0,40}/dev/shm[^\n]{0,60})",
        "the shared memory of the server's container is too small: {what}",
        "give the container more shared memory: ipc host, or a larger shm size",
    ),
]
