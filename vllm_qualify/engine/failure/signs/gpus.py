"""Signs of GPUs that are missing, broken, too new or too old, and of ranks that do not reach one another."""

from vllm_qualify.engine.failure.signs.sign import NEXT_LINES, line_up_to, make_sign

SIGNS = [
    make_sign(
        "driver-too-old",
        r"The NVIDIA driver on your system is too old \(found version (?P<major>\d\d)0?(?P<minor>\d+)\d\)",
        "this host's NVIDIA driver is too old: it has CUDA {major}.{minor} at most",
    ),
    make_sign(
        "driver-too-old",
        r"unsatisfied condition: (?P<condition>(?:cuda|driver)\S*?),?(?:\s|$)",
        "this host's NVIDIA driver is too old: the image needs {condition}",
    ),
    make_sign(
        "driver-too-old",
        r"CUDA driver version is insufficient for CUDA runtime version|Error 80[34]: [^(\n]+",
        "this host's NVIDIA driver does not serve this CUDA version: {whole}",
    ),
    make_sign(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system|Failed to infer device type|Error 802: [^(\n]+",
        "the server found no GPU that it can use: {whole}",
        needs=("No CUDA GPUs", "Found no NVIDIA", "Failed to infer", "Error 802"),
    ),
    # The container's toolkit puts the driver's libraries into a container; an image without them has empty files.
    make_sign(
        "no-gpu",
        r"libcuda\.so(?:\.1)? cannot (?:be )?found|lib(?:cuda"
        r"|nvidia-ml)\.so(?:\.\d{1,6}){0,4}: (?:cannot open shared object file|file too short|invalid ELF header)",
        "the server found no NVIDIA driver: {whole}",
    ),
    make_sign(
        "too-few-gpus",
        r"World size \((?P<ranks>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "the server has {ranks} ranks, and sees {gpus} GPUs",
    ),
    make_sign(
        "nccl-failure",
        rf"{line_up_to('NCCL error|ncclInvalidUsage')}{NEXT_LINES}"
        r"(?P<telling>Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+))",
        "NCCL: rank {one} and rank {other} are on the same GPU",
        "give each rank a GPU of its own: check CUDA_VISIBLE_DEVICES and the sum of the parallel sizes",
        needs=("Duplicate GPU detected",),
    ),
    make_sign(
        "nccl-failure",
        rf"{line_up_to('NCCL error|ncclSystemError|NCCL WARN')}{NEXT_LINES}"
        r"(?P<telling>Error while creating shared memory segment (?P<name>\S+) \(size (?P<size>\d+)\))",
        "NCCL got no shared memory: {name}, {size} bytes",
        "give the container more shared memory: ipc host, or a larger shm size",
        needs=("Error while creating shared memory segment",),
    ),
    make_sign(
        "nccl-failure",
        rf"{line_up_to('NCCL error')}{NEXT_LINES}(?P<telling>Bootstrap : no socket interface found)",
        "NCCL: no network interface of this host fits",
        "set NCCL_SOCKET_IFNAME to an interface that the server sees, or unset it",
        needs=("no socket interface found",),
    ),
    # The ranks wait for one another; which one was late can be chance.
    make_sign(
        "nccl-failure",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<what>\w+),"
        r".{0,300}?ran for (?P<ms>\d+) milliseconds",
        "NCCL: a collective operation ({what}) was not over after {ms} ms",
        retry=True,
    ),
    make_sign("nccl-failure", r"NCCL error(?: in)?: (?:\S+:\d+, )?(?P<what>[^(,\n]{1,300}?)(?: \(| -|,|$)", "NCCL: {what}"),
    make_sign(
        "nccl-failure",
        r"\b(?P<what>nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)(?:Error)?): .+",
        "NCCL: {what}",
        needs=("ncclSystem", "ncclInternal", "ncclRemote", "ncclUnhandledCuda", "ncclInvalidUsage"),
    ),
    make_sign("nccl-failure", r"NCCL error \S{1,200} '(?P<what>[^'\n]{1,200})'", "NCCL: {what}"),
    make_sign(
        "nccl-failure",
        r"RPC call to (?P<call>\w{1,60}) timed out",
        "a rank did not answer any more ({call} timed out)",
        "set NCCL_DEBUG=INFO and see which rank stood still: the links between the GPUs, a GPU, or the release; no "
        "option does it",
        retry=True,
    ),
    make_sign(
        "rendezvous",
        r"(?P<what>(?:The client socket has|Timed out after \d+ seconds waiting for clients"
        r"|connection attempt)[^\n]{0,40}timed out[^\n]{0,200}"
        r"|Timed out after \d+ seconds waiting for clients[^\n]{0,100}|Gloo connectFullMesh failed[^\n]{0,200}"
        r"|gloo/transport[^\n]{0,80}Unable to find [^\n]{1,100}"
        r"|store->get\('[^'\n]{1,40}'\) got error: [^\n]{1,100}"
        r"|ZMQError: Cannot assign requested address[^\n]{0,100}"
        r"|DistNetworkError: [^\n]{1,200}|DistStoreError: [^\n]{1,200}|wait timeout after \d+ ?ms[^\n]{0,100})",
        "the ranks did not meet: {what}",
        needs=(
            "The client socket has",
            "waiting for clients",
            "connection attempt",
            "connectFullMesh",
            "gloo/transport",
            "store->get",
            "ZMQError",
            "DistNetworkError",
            "DistStoreError",
            "wait timeout",
        ),
    ),
    make_sign(
        "gpu-broken",
        r"(?P<what>uncorrectable (?:ECC|NVLink) error[^\n]{0,60}|GPU has fallen off the bus|GPU is lost[^\n]{0,60}"
        r"|hardware stack error"
        r"|Unable to determine the device handle for GPU[^\n]{0,100}|CUDA error: unknown error"
        r"|Uncorrectable \S{1,20} error[^\n]{0,60})",
        "a GPU of this host is broken: {what}",
    ),
    make_sign(
        "driver-too-old",
        r"the provided PTX was compiled with an unsupported toolchain",
        "this host's NVIDIA driver is older than the CUDA of the engine: {whole}",
    ),
    make_sign(
        "unsupported-gpu",
        r"(?P<what>no kernel image is available for execution on the device|device kernel image is invalid"
        r"|HIP error: invalid device function"
        r"|hipErrorNoBinaryForGpu[^\n]{0,100}|No compiled \w{1,60} for [^\n]{1,100}"
        r"|No supported CUDA architectures found for [^\n]{1,100}"
        r"|CUDA error: invalid device function)",
        "the engine was not built for this GPU: {what}",
    ),
    make_sign(
        "unsupported-gpu",
        r"ptxas fatal\s{0,10}: +Value '(?P<arch>sm_\w{1,10})' is not defined"
        r"|nvcc fatal\s{0,10}: Unsupported gpu architecture '(?P<other>\w{1,20})'",
        "the engine's compiler does not know this GPU: {whole}",
        "take an image whose CUDA knows this GPU, or name a newer ptxas in TRITON_PTXAS_PATH",
    ),
    make_sign(
        "no-gpu",
        r"No HIP GPUs are available|no ROCm-capable device is detected|hipErrorNoDevice|Unable to open /dev/kfd[^\n]{0,100}",
        "the server found no GPU that it can use: {whole}",
        "give the server a GPU, and check it with `rocm-smi` where the server runs",
    ),
    make_sign(
        "no-gpu",
        r"CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected",
        "the server found no GPU that it can use: {whole}",
        retry=True,
    ),
    make_sign(
        "no-gpu",
        r"CUDA unknown error - this may be due to an incorrectly set up environment|Device string must not be empty"
        r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED|nrt_init failed[^\n]{0,60}"
        r"|TPU initialization failed[^\n]{0,200}"
        r"|No XPU devices are available|[Nn]euron device not found",
        "the server found no GPU or device that it can use: {whole}",
        needs=("CUDA unknown error", "Device string", "NVML_SUCCESS", "nrt_init", "TPU init", "No XPU", "euron device"),
    ),
    make_sign(
        "too-few-gpus", r"(?:CUDA|HIP) error: invalid device ordinal", "the server sees fewer GPUs than it was told: {whole}"
    ),
    make_sign(
        "too-few-gpus",
        r"Cannot provide a placement group of [^\n]{1,200}|[Cc]urrent node has no [GNTXH]PU available[^\n]{0,100}"
        r"|Ray does not allocate any GPUs on the driver node"
        r"|number of required \w{1,10} exceeds the total number of available[^\n]{0,100}"
        r"|No available node types can fulfill resource request[^\n]{0,200}",
        "Ray has too few GPUs: {whole}",
        needs=("placement group", "urrent node has no", "Ray does not", "number of required", "No available node types"),
    ),
]
