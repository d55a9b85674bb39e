"""Signs of what surrounds the engine, in words that many programs share: devices, packages, shells, networks."""

from vllm_qualify.engine.failure.signs.sign import make_sign

SIGNS = [
    make_sign(
        "no-gpu",
        r"(?P<what>(?:unknown or invalid runtime name: nvidia|[^\n]{0,300}nvidia-container-runtime\S{0,20}:? "
        r"(?:no such file|executable file not found|not found))[^\n]{0,100})",
        "the container's runtime cannot give it a GPU: {what}",
        "give the container the host's GPUs: the NVIDIA container toolkit, its runtime, and --gpus or a device request",
        needs=("runtime name: nvidia", "nvidia-container-runtime"),
    ),
    make_sign(
        "port-in-use",
        r"^[^\n]{0,400}(?:EADDRINUSE|port is already allocated|failed to bind host port)[^\n]{0,100}",
        "the server's port is in use: {whole}",
        needs=("EADDRINUSE", "port is already allocated", "failed to bind host port"),
    ),
    make_sign(
        "no-gpu",
        r"lib(?:ascend_hal|drvdsmi_host|dcmi|tpu_driver|habanalabs\w{0,20})\.so[\d.]{0,20}: cannot open shared object file",
        "the server found no driver of its device: {whole}",
        "give the container the device and the driver's folder of this host",
        needs=("cannot open shared object file",),
    ),
    make_sign(
        "too-few-gpus",
        r"device >= 0 && device < (?:num_gpus|device_count)[^\n]{0,100}",
        "the server sees fewer GPUs than it was told: {whole}",
    ),
    make_sign(
        "rendezvous",
        r"makeDeviceFor(?:Hostname|Interface)\(\): [^\n]{1,100}",
        "the ranks have no network interface to meet at: {whole}",
    ),
    make_sign(
        "no-permission",
        r"what\(\):  (?P<why>Operation not permitted|Permission denied)",
        "native code of the server may not do what it needs: {why}",
        "give the container the right to start threads and to bind memory: a newer runtime, or another security profile",
    ),
    make_sign(
        "engine-bug",
        r"(?P<what>(?:UVA|[Pp]in(?:ned)? memory) is not available)",
        "the engine needs memory that this system does not give, and has no other way: {what}",
        "report it to vLLM with the log; on WSL set VLLM_WSL2_ENABLE_PIN_MEMORY=1, or take another version",
        needs=("emory is not available", "UVA is not available"),
    ),
    make_sign(
        "hung",
        r"(?P<what>Timed out waiting for (?:READY|engines to send)[^\n]{0,200})",
        "the server waited for its engines, and gave up: {what}",
        "see what the engines did meanwhile; raise the time that they may take if they only need longer",
        needs=("Timed out waiting for ",),
    ),
    make_sign(
        "out-of-memory",
        r"(?P<what>exceeds memory available in /dev/shm[^\n]{0,200}|exceeds the (?:size of|available) /dev/shm[^\n]{0,100})",
        "the shared memory of the server's container is too small: {what}",
        "give the container more shared memory: ipc host, or a larger shm size",
        needs=(" /dev/shm",),
    ),
    # The words of the kernel and of the runtimes of TPUs, NPUs and other devices.
    make_sign(
        "gpu-memory-in-use",
        r"(?P<what>[^\n]{0,200}(?:/dev/(?:vfio|accel|davinci|neuron|hl)|[Ii]nitializ|TPU)[^\n]{0,100}"
        r"(?:Device or resource busy|already in use by)[^\n]{0,60})",
        "another process holds the device: {what}",
        "stop what else uses the device",
        needs=("Device or resource busy", "already in use by"),
    ),
    # A GPU or a slice of one may have such a name, and vLLM takes it for a number.
    make_sign(
        "engine-bug",
        r"invalid literal for int\(\) with base 10: '(?P<name>(?:GPU|MIG)-[\w/-]{1,60})'",
        "this vLLM does not read a GPU's UUID: {name}",
        "name the GPUs by their numbers in CUDA_VISIBLE_DEVICES, or take another version",
    ),
    make_sign(
        "engine-bug",
        r"Not enough (?:allowed )?NUMA nodes to bind [^\n]{1,200}",
        "the engine counts more ranks than this host has NUMA nodes: {whole}",
        "name the cores of each rank in VLLM_CPU_OMP_THREADS_BIND, or report it with the log",
    ),
    # The sizes are those that vLLM chose for its own kernel.
    make_sign(
        "engine-bug",
        r"out of resource: (?P<what>\w[\w ]{0,40}), Required: (?P<asked>\d+), Hardware limit: (?P<has>\d+)",
        "a kernel of the engine asks for more of the GPU ({what}) than it has: {asked}, and not {has}",
        through=r"/vllm/model_executor/layers/",
        needs=("out of resource: ",),
    ),
    make_sign(
        "broken-installation",
        r"'(?P<name>[\w.-]{1,60})' is already used by a Transformers (?:config|model|\w{1,20}), pick another name"
        r"|^AttributeError: '?(?P<class>\w{0,60}(?:Tokenizer|TokenizerFast|TokenizersBackend|Processor))'?(?: object)? has no "
        r"attribute '?\w{1,60}",
        "the engine's transformers is not one that this vLLM takes: {whole}",
        "install the transformers that this vLLM names, or take a newer vLLM",
        needs=("is already used by a Transformers", "AttributeError: "),
    ),
    make_sign(
        "no-permission",
        r"(?:^|/)(?:ba|da|z)?sh: (?:line )?(?:\d{1,6}: )?(?P<program>[^\n:]{1,200}): (?:Permission denied"
        r"|Operation not permitted)",
        "the server's user may not run {program}",
        "run the server as a user that may, or let the image's builder open its program to others",
        needs=("ermission denied", "Operation not permitted"),
    ),
]

GENERAL_SIGNS = [
    # Its compiled part was not imported, which only a warning told.
    make_sign(
        "broken-installation",
        r"^NameError: name '(?P<name>\w{1,60})' is not defined",
        "the engine's compiled part could not be imported: {name}",
        through=r"/vllm/(?:_custom_ops|_\w{1,20}_ops|distributed/device_communicators/pynccl\w{0,20})\.py",
    ),
    # NVIDIA's toolkit is the hook of a container that gets GPUs; where it says why, the why counts.
    make_sign(
        "no-gpu",
        r"(?P<what>error running (?:prestart )?hook[^\n]{0,200}"
        r"|invoking the NVIDIA Container Runtime Hook directly[^\n]{0,100})",
        "the container's runtime cannot give it a GPU: {what}",
        "give the container the host's GPUs: the NVIDIA container toolkit, its runtime, and --gpus or a device request",
        needs=("error running ", "NVIDIA Container Runtime Hook"),
    ),
    # A package may quote the system's words in its own exception.
    make_sign(
        "no-permission",
        r"^(?:\w{1,40}\.){0,6}\w{1,40}Error: [^\n]{1,300}\[Errno (?:1|13|30)\] (?P<why>(?!error while attempting)[^\n]{1,300})",
        "the server's user may not write or run something: {why}",
        needs=("[Errno 1] ", "[Errno 13]", "[Errno 30]"),
    ),
    make_sign(
        "no-compiler",
        r"(?P<why>InvalidCxxCompiler[^\n]{0,200}|No working C(?:\+\+)? compiler[^\n]{0,200}|CppCompileError[^\n]{0,200}"
        r"|CalledProcessError: Command '?\[?'?(?:/\S{1,200}/)?(?:[\w-]{0,40}-)?(?:gcc|g\+\+|cc|c\+\+|nvcc|hipcc|icpx|clang"
        r"|clang\+\+"
        r"|ninja)(?:-\d{1,2})?\b[^\n]{1,1000} returned non-zero"
        r"|FAILED: (?:\[code=\d{1,3}\] )?\S{0,300}\.(?:so|o|cubin)\b[^\n]{0,100})",
        "what compiles the model or a kernel has no compiler that works: {why}",
        needs=("InvalidCxxCompiler", "No working C", "CppCompileError", "CalledProcessError", "FAILED: "),
    ),
    make_sign(
        "broken-installation",
        r"(?P<why>[^\n]{0,60}\bruntime \w{1,20} library: \S{1,30} but source was compiled with: \S{1,30}[^\n]{0,100})",
        "libraries of the engine do not fit together: {why}",
        needs=("but source was compiled with",),
    ),
    make_sign(
        "no-gpu",
        r"(?P<what>(?:Unable|Failed) to initiali[sz]e (?:the )?(?:backend '(?!cpu)\w{1,20}'|TPU|NPU|XPU|HPU|GPU|[Dd]evice"
        r"|[Dd]river)"
        r"[^\n]{0,200})",
        "the server could not open its device: {what}",
        needs=(" to initiali",),
    ),
    make_sign(
        "no-gpu",
        r"(?P<what>\b[Nn]o (?:\w{1,20}[ -]){0,3}(?:GPU|[Dd]evice|[Aa]ccelerator|NPU|XPU|TPU|HPU)(?:s|\(s\))? (?:(?:is|are|was"
        r"|were) )?"
        r"(?:found|available|detected|visible)\b[^\n]{0,60}|No device of requested type[^\n]{0,40}"
        r"|NvRm\w{1,30} failed[^\n]{0,60}|Device acquire failed[^\n]{0,60}"
        r"|[Uu]nable to (?:find|detect|locate) (?:a |any )?(?:\w{1,20} )?(?:GPU|device|accelerator)s?\b[^\n]{0,60}"
        r"|(?:rtGetDeviceCount|aclInit|aclrtSetDevice|rtSetDevice)\b[^\n]{0,60}\bfail[^\n]{0,60})",
        "the server found no GPU or device that it can use: {what}",
        needs=(
            "o device",
            "o GPU",
            "o CUDA",
            "o HIP",
            "o ROCm",
            "o Level",
            "ccelerator",
            "PU",
            "evices",
            "NvRm",
            "Device",
            "rtGet",
            "acl",
        ),
    ),
    make_sign(
        "nccl-failure",
        r"(?P<what>\bDistBackendError: [^\n]{1,200}|\bUCX +ERROR [^\n]{1,200}|\bibv_\w{1,30}\b[^\n]{0,60}\bfail[^\n]{0,100}"
        r"|\|CCL_ERROR\| [^\n]{1,200}|\bE[IJ]\d{4}: [^\n]{1,200}|\[DeepEP\][^\n]{0,100}(?:fail|time)[^\n]{0,60}"
        r"|CUDA error: peer access[^\n]{0,100})",
        "the ranks' network or its library failed: {what}",
        needs=("DistBackendError", "CCL_ERROR", "UCX ", "ibv_", "EI0", "EJ0", "[DeepEP]", "peer access"),
    ),
    make_sign(
        "rendezvous",
        r"(?P<what>gloo/[^\n]{1,100}\] [^\n]{1,200})",
        "the ranks did not meet, or lost one another: {what}",
        needs=("gloo/",),
    ),
    make_sign(
        "gpu-broken",
        r"(?P<what>NVRM: Xid [^\n]{1,100}|\bXid \(PCI[^\n]{1,100}|GPU requires reset[^\n]{0,60}"
        r"|in need of (?:a )?reset[^\n]{0,60}|hardware (?:failure|fault|error)\b[^\n]{0,60})",
        "a GPU of this host is broken: {what}",
        needs=("Xid ", "reset", "hardware "),
    ),
    make_sign(
        "unsupported-gpu",
        r"(?P<what>which is too (?:old|new) to be supported by [^\n]{1,200}|no kernel found to launch[^\n]{0,60}"
        r"|[Nn]o compatible (?:code objects?|kernels?|binar\w{1,4}) [^\n]{1,80}"
        r"|The (?:device|GPU) [^\n]{1,80}(?:doesn't|does not) support[^\n]{1,100}"
        r"|with CUDA capability sm_\w{1,6} is not compatible with[^\n]{0,100}"
        r"|Value 'sm_\w{1,6}' is not defined for option[^\n]{0,40}"
        r"|nvrtc: error: invalid value for --gpu-architecture[^\n]{0,60}|NVRTC[^\n]{0,40}invalid value for[^\n]{0,60})",
        "the engine, or its compiler, was not made for this GPU: {what}",
        needs=(
            "to be supported by",
            "no kernel found",
            "CUDA capability",
            "nvrtc",
            "NVRTC",
            "Value 'sm_",
            "o compatible",
            "The device",
            "The GPU",
        ),
    ),
    make_sign(
        "cuda-out-of-memory",
        r"(?P<what>\bnrt_\w{1,40} status=4\b[^\n]{0,60}|\bE[EL]\d{4}: [^\n]{0,60}(?:out of memory|alloc)[^\n]{0,60})",
        "the device ran out of memory: {what}",
        needs=("nrt_", "EE", "EL"),
    ),
    make_sign(
        "crashed",
        r"(?P<what>\bnrt_\w{1,40} status=[1-9][^\n]{0,60}|\bsynStatus[ =][^\n]{1,100}|FATAL ERROR :: MODULE:[^\n]{1,200})",
        "native code of the release failed on the device: {what}",
        needs=("synStatus", "FATAL ERROR ::", "nrt_"),
    ),
    make_sign(
        "no-compiler",
        r"(?P<what>fatal error: '?\S{1,100}'? file not found|\bld(?:\.\w{1,5})?: (?:cannot find"
        r"|unable to find library)[^\n]{1,100}"
        r"|(?:gcc|g\+\+|cc|c\+\+|nvcc|clang)\S{0,10}: (?:error|fatal error): (?:unrecognized|unsupported|unknown)[^\n]{1,100}"
        r"|No CMAKE_\w{1,10}_COMPILER could be found|(?:cicc|cudafe\+\+|ptxas|fatbinary|hipcc): (?:command )?not found)",
        "a kernel could not be built with this host's compilers and headers: {what}",
        needs=(
            "file not found",
            "cannot find",
            "unable to find library",
            "error: un",
            "_COMPILER could",
            "cicc: ",
            "cudafe++: ",
            "ptxas: ",
            "fatbinary: ",
            "hipcc: ",
        ),
    ),
    make_sign(
        "broken-installation",
        r"(?P<what>cannot allocate memory in static TLS block|Failed to load (?:the )?NCCL library[^\n]{0,60}"
        r"|failed to open libnvrtc\S{0,40}|VersionConflict: [^\n]{1,200}|[^\n]{0,60}requires (?:a )?different Python[^\n]{0,60}"
        r"|No matching distribution found for [^\n]{1,60}|No solution found when resolving[^\n]{0,60}"
        r"|Failed building wheel for [^\n]{1,60}|error: subprocess-exited-with-error"
        r"|is not a supported wheel on this platform|Could not build wheels for [^\n]{1,60}"
        r"|but you have \S{1,60} \S{1,40} which is incompatible"
        r"|CUDA Setup failed despite[^\n]{1,60}|libstreamer due to: b ?'[^'\n]{1,40}not supported'"
        r"|ResolutionImpossible[^\n]{0,60}|CMake Error [^\n]{1,100})",
        "a package of the engine is missing or does not fit: {what}",
        needs=(
            "static TLS",
            "CUDA Setup",
            "NCCL library",
            "libnvrtc",
            "VersionConflict",
            "Python",
            "No ",
            "wheel",
            "which is incompatible",
            "libstreamer",
            "Resolution",
            "CMake",
            "subprocess-",
        ),
    ),
    make_sign(
        "gated-model",
        r"(?P<what>Illegal header value b'Bearer ?'[^\n]{0,40}|Invalid (?:username or password"
        r"|credentials in Authorization header"
        r"|user token)[^\n]{0,60}|Access to model \S{1,100} is restricted[^\n]{0,60}|You must be authenticated to access it"
        r"|you are not in the authorized list[^\n]{0,60}|is awaiting a review from[^\n]{0,60})",
        "the hub does not give the model to this token, or to nobody without one: {what}",
        needs=("Bearer", "Invalid ", "is restricted", "authenticated", "authorized list", "a review"),
    ),
    make_sign(
        "hub-unreachable",
        r"(?P<what>\b(?:ChunkedEncodingError|IncompleteRead|RemoteDisconnected|RemoteProtocolError|EndpointConnectionError"
        r"|ProtocolError"
        r"|ReadTimeoutError|ConnectTimeoutError|NewConnectionError|NameResolutionError|ServerDisconnectedError"
        r"|ClientConnectorError"
        r"|ClientPayloadError|MaxRetryError|ConnectTimeout|ReadTimeout)\b[^\n]{0,200}"
        r"|\b50[234] (?:Bad Gateway|Service (?:Temporarily )?Unavailable|Gateway Time-?out)[^\n]{0,100}"
        r"|CAS (?:service|[Cc]lient) [Ee]rror[^\n]{0,100}|libstreamer due to: b ?'(?![^'\n]{1,40}not supported)[^\n]{1,60})",
        "a host of the network did not answer: {what}",
        needs=(
            "ChunkedEncodingError",
            "IncompleteRead",
            "RemoteDisconnected",
            "ProtocolError",
            "EndpointConnectionError",
            "ReadTimeout",
            "ConnectTimeout",
            "NewConnectionError",
            "NameResolutionError",
            "ServerDisconnectedError",
            "ClientConnectorError",
            "ClientPayloadError",
            "MaxRetryError",
            " Unavailable",
            "Bad Gateway",
            "Gateway Time",
            "CAS ",
            "libstreamer",
        ),
    ),
    # A kernel that FlashInfer fetches.
    make_sign(
        "hub-unreachable",
        r"^(?:\w{1,40}\.){0,6}\w{1,40}(?:Error|Exception)(?:: (?P<why>[^\n]{1,300}))?$",
        "a kernel of FlashInfer could not be fetched: {why}",
        "FlashInfer fetches kernels when it starts: give the server a network, or install flashinfer-cubin, which has them",
        through=r"/flashinfer/(?:jit/cubin_loader|artifacts)\.py",
    ),
    make_sign(
        "engine-bug",
        r"^AssertionError(?:: (?P<why>[^\n]{1,300}))?$",
        "the model could not be compiled: {why}",
        "report it to vLLM with the log; enforce-eager starts without compiling, and is slower",
        through=r"/(?:torch/_(?:inductor|dynamo|functorch)|vllm/compilation)/",
        needs=("AssertionError",),
    ),
]
