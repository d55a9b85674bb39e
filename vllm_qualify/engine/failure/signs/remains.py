"""Signs of a server's surroundings in words so common that they count only where nothing else tells why the server ended."""

from vllm_qualify.engine.failure.signs.sign import make_sign

LAST_SIGNS = [
    make_sign("hub-unreachable", r"\[Errno 101\] Network is unreachable", "a host of the network cannot be reached: {whole}"),
    make_sign(
        "rendezvous",
        r"\[Errno 11[0-3]\] (?P<why>[^\n]{1,100})",
        "a host or a process did not answer: {why}",
        needs=("[Errno 11",),
    ),
    make_sign(
        "disk-full",
        r"(?P<what>\S{1,200} is over \d\d% full[^\n]{0,100}|[Nn]ot enough (?:free |disk ){1,2}space[^\n]{0,100})",
        "a disk of this host is nearly full: {what}",
        needs=("% full", "ot enough "),
    ),
    make_sign(
        "no-permission",
        r"(?P<what>\b(?:mkdir|open|touch|cp|mv|rm|chown|chmod|ln|unlink|write|create|cannot \w{1,20}|exec)\b[^\n]{0,200}"
        r"(?:[Pp]ermission denied|Read-only file system))",
        "the server's user may not write or run something: {what}",
        needs=("ermission denied", "Read-only file system"),
    ),
    # The container's runtime says it, before any program of the image runs.
    make_sign(
        "broken-installation",
        r"(?P<what>(?:Error response from daemon: |OCI runtime )[^\n]{1,200})",
        "the container's runtime did not start the server: {what}",
        "see the runtime's message: no program of the image ran",
        of_image=False,
        needs=("Error response from daemon: ", "OCI runtime "),
    ),
    # What moves the KV cache between servers, and its services.
    make_sign(
        "nccl-failure",
        r"(?P<what>(?i:transfer engine|mooncake|nixl|nvshmem|\bucx\b|\brdma\b)[^\n]{0,40}(?i:initiali[sz]ation failed"
        r"|init failed"
        r"|failed to init)[^\n]{0,60})",
        "the servers or ranks could not be connected: {what}",
        "check that the server may use this host's network cards: their devices, and the container's rights",
        needs=("nit",),
    ),
    make_sign(
        "rendezvous",
        r"(?P<what>\b(?:RPC|grpc|gRPC|http client|handshake|metadata server|etcd)\b[^\n]{0,100}\b(?:[Ff]ail(?:ed|ure)?"
        r"|timed out|refused"
        r"|unreachable|error)\b[^\n]{0,100})",
        "a service that the engine needs did not answer: {what}",
        needs=("RPC", "http client", "handshake", "metadata server", "etcd"),
    ),
    make_sign(
        "broken-installation",
        r"(?P<what>\b[A-Z]\w{1,40} (?:is )?not (?:available|installed))$",
        "a package of the engine is missing: {what}",
        needs=(" not available", " not installed"),
    ),
    # A part of the engine waited for another one.
    make_sign(
        "hung",
        r"^(?P<what>(?:(?:\w{1,40}\.){0,6}Timeout(?:Error|Expired|Exception)|(?:\w{1,40}\.){1,6}Timeout)(?:: [^\n]{1,200}|$))",
        "a part of the engine waited for another one, and gave up: {what}",
        "see what was waited for; raise the time that it may take if it only needs longer",
        needs=("Timeout",),
    ),
    # Ray's, gunicorn's and others' words about a process that ended without a word of its own.
    make_sign("killed", r"^KeyboardInterrupt: terminated", "the server was stopped from outside: {whole}"),
    make_sign(
        "killed",
        r"(?P<what>was sent SIGKILL[^\n]{0,60}|Signal 9 \(SIGKILL\) received by[^\n]{0,40}|exitcode\s{0,3}: -9\b[^\n]{0,40}"
        r"|[Tt]he actor (?:is dead because its worker process has died|died unexpectedly)[^\n]{0,100}"
        r"|(?:exit(?:ed)?|died|terminated)[^\n]{0,30}(?:code:?|status|signal) ?-?(?:9|137)\b[^\n]{0,40})",
        "a process of the server was killed, or ended without telling why: {what}",
        needs=("SIGKILL", "exitcode", "he actor ", "code", "status", "signal"),
    ),
    make_sign(
        "crashed",
        r"(?P<what>died with <Signals\.SIG(?:SEGV|ABRT|BUS|ILL|FPE)[^\n]{0,20}|Signal (?:4|6|7|8"
        r"|11) \(SIG\w{2,6}\) received by[^\n]{0,40}"
        r"|exitcode\s{0,3}: -(?:4|6|7|8|11)\b[^\n]{0,40}|(?:exit(?:ed)?|died|terminated)[^\n]{0,30}(?:code:?|status|signal) ?"
        r"-?(?:4|6|7|8|11|132|134|135|136|139)\b[^\n]{0,40})",
        "native code of the server crashed: {what}",
        needs=("Signals.", "Signal ", "exitcode", "code", "status", "signal"),
    ),
    # The line after this one names the cause, if any does.
    make_sign(
        "engine-bug",
        r"torch\._(?:inductor|dynamo)\.exc\.(?P<what>BackendCompilerFailed: [^\n]{1,100} raised:)",
        "the model could not be compiled: {what}",
        "report it to vLLM with the log; enforce-eager starts without compiling, and is slower",
    ),
    make_sign(
        "engine-bug",
        r"^AssertionError: (?P<why>[^\n]{0,200}(?:compil|inductor|dynamo|cudagraph|CUDA graph)[^\n]{0,100})",
        "the model could not be compiled: {why}",
        needs=("AssertionError: ",),
    ),
    # Ray's own processes, and its errors about them.
    make_sign(
        "rendezvous",
        r"(?P<what>\bE \d{1,10} \d{1,10}\] (?:\(\w{1,20}\) )?\w{1,40}\.(?:cc|h|cpp):\d{1,6}: [^\n]{1,200}"
        r"|Ray processes died[^\n]{0,60}"
        r"|[Rr]aylet (?:process )?(?:died|exited|crashed|is dead)[^\n]{0,60}"
        r"|(?:LocalRayletDied|NodeDied|RaySystem|RayletDied|GcsTimeout)Error\b[^\n]{0,200})",
        "Ray did not start, or lost a process: {what}",
        "see Ray's own logs (/tmp/ray/session_latest/logs), and `ray status`",
        needs=(".cc:", ".h:", ".cpp:", "Ray processes died", "aylet ", "RayletDied", "NodeDied", "RaySystem", "GcsTimeout"),
    ),
    make_sign(
        "killed",
        r"(?P<what>(?:WorkerCrashed|ActorDied|ActorUnavailable|OwnerDied|RayActor|ChildProcess)Error\b[^\n]{0,200})",
        "a process of the server ended without telling why: {what}",
        needs=("WorkerCrashed", "ActorDied", "ActorUnavailable", "OwnerDied", "RayActor", "ChildProcess"),
    ),
]
