"""Signs of what runs the engine: the container's runtime, the shell, Python's interpreter, the file system."""

from vllm_qualify.engine.failure.signs.sign import make_sign

_GIVE_GPUS = "give the container the host's GPUs: the NVIDIA container toolkit, its runtime, and --gpus or a device request"
_FILE_SYSTEM = "check the file system and what mounts it on this host: a network share, a volume, a disk"

SIGNS = [
    make_sign(
        "no-gpu",
        r"nvidia-container-cli: (?!requirement error)(?P<why>[^\n]{1,200})"
        r"|(?P<other>could not select device driver [^\n]{0,40}with capabilities: [^\n]{1,60}"
        r"|failed to (?:inject|discover) (?:CDI|GPU) [^\n]{1,100}|unresolvable CDI devices [^\n]{1,100})",
        "the container's runtime cannot give it a GPU: {whole}",
        _GIVE_GPUS,
        needs=("nvidia-container-cli", "with capabilities", "CDI", "GPU"),
    ),
    make_sign(
        "broken-installation",
        r"(?:sh|bash|exec)[^\n]{0,60}[ \"'](?P<program>vllm|python3?)[\"']?: "
        r"(?:(?:command |executable file )?not found|No such file or directory|cannot execute)"
        r"|^exec (?P<other>\S{1,200}): no such file or directory",
        "the server's program is not there: {program}{other}",
        needs=("not found", "o such file", "cannot execute"),
    ),
    make_sign(
        "broken-installation",
        r"^\S{1,200}python[\d.]{0,6}: "
        r"(?P<why>No module named [^\n]{1,100}|Error while finding module specification for [^\n]{1,200})",
        "Python does not find the engine: {why}",
        needs=("No module named", "finding module specification"),
    ),
    make_sign(
        "unsupported-gpu",
        r"\bexec [^\n]{1,200}: exec format error",
        "the image or the program was built for another processor architecture: {whole}",
        "take an image for this host's processor (amd64, arm64)",
        needs=("exec format error",),
    ),
]

GENERAL_SIGNS = [
    make_sign(
        "unknown",
        r"(?:OSError: \[Errno (?:5|103|107|112|116|121)\] |\w{1,40}Error: (?=[^\n]{1,100}\(os error (?:5|19|22|103|107|112|116"
        r"|121)\)))"
        r"(?P<why>[^\n]{1,200})",
        "a file system of this host does not answer: {why}",
        _FILE_SYSTEM,
        turn="host",
        needs=("OSError: [Errno ", "os error "),
    ),
    make_sign(
        "no-permission",
        r"PermissionError at (?P<path>\S{1,300}) when downloading|[Pp]ermission denied \(os error 13\)[^\n]{0,100}"
        r"|cannot cache function '[^'\n]{1,100}': no locator available for file '[^'\n]{1,200}'"
        r"|Could not determine home directory|Can't determine home directory",
        "the server's user lacks a folder that it may write: {whole}",
        needs=("PermissionError at", "ermission denied", "cannot cache function", "determine home"),
    ),
    make_sign(
        "hub-unreachable",
        r"(?P<why>\[SSL: (?:CERTIFICATE_VERIFY|WRONG_VERSION|UNEXPECTED_EOF|TLSV1|SSLV3)\w{0,60}\][^\n]{0,200}"
        r"|ProxyError: [^\n]{1,200}|http(?:x|core)\d?\.(?:Connect|Read)(?:Error|Timeout): [^\n]{1,200})",
        "a host of the network did not answer, or its certificate is not trusted: {why}",
        "check the network, the proxy, HF_ENDPOINT, and the certificates that the server trusts (SSL_CERT_FILE)",
    ),
    make_sign(
        "crashed",
        r"(?:Fatal Python error: |^\*\*\* )(?P<what>Segmentation fault|Bus error|Illegal instruction|Aborted"
        r"|Floating[ -]point exception|SIG(?:SEGV|BUS|ABRT|ILL|FPE) received)",
        "native code of the server crashed: {what}",
        needs=("Fatal Python error", "*** "),
    ),
    make_sign(
        "crashed",
        r"^(?P<what>(?:free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): [^\n]{1,60}"
        r"|corrupted (?:size|double-linked)[^\n]{1,60}|double free or corruption[^\n]{0,20}"
        r"|\*\*\* stack smashing detected[^\n]{0,40})",
        "native code of the server corrupted its memory: {what}",
    ),
    make_sign(
        "crashed",
        r"^(?P<what>terminate called after throwing an instance of "
        r"'(?:c10::|torch::|std::(?:out_of_range|logic_error|length_error))[^'\n]{0,100}'"
        r"|[^\n]{0,200}INTERNAL ASSERT FAILED at [^\n]{1,200})",
        "native code of the release failed: {what}",
        needs=("terminate called", "INTERNAL ASSERT"),
    ),
]

LAST_SIGNS = [
    # The shell's words on how its program ended.
    make_sign(
        "crashed",
        r"^(?:[^\n]{0,200}[: ])?(?P<what>Segmentation fault|Illegal instruction|Aborted|Bus error)(?: +\(core dumped\)|$)",
        "native code of the server crashed: {what}",
        needs=("Segmentation fault", "Illegal instruction", "Aborted", "Bus error"),
    ),
    make_sign(
        "killed", r"^(?:[^\n]{0,200}[: ])?Killed(?: {2,}[^\n]{0,200})?$", "the server was killed: {whole}", needs=("Killed",)
    ),
    make_sign(
        "out-of-memory",
        r"died with <Signals\.SIGKILL: 9>",
        "a program that the server started was killed, most likely as the host's memory ran out",
        "raise the container's or the host's memory, or set MAX_JOBS to a lower number",
    ),
    # A rank's address, or that of the server itself.
    make_sign("rendezvous", r"gaierror: \[Errno -\d\] (?P<why>[^\n]{1,100})", "a name of a host is not known: {why}"),
]
