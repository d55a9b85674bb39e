"""Signs of a host or an image that lacks something: ports, permissions, disk, compilers, libraries."""

from vllm_qualify.engine.failure.signs.sign import make_sign

_NVCC_REMEDY = (
    "install CUDA's toolkit where the server runs, and name it in CUDA_HOME, or take an image that has it; for "
    "FlashInfer's sampler VLLM_USE_FLASHINFER_SAMPLER=0 does too"
)
# Where Triton, torch, vLLM and kernels' packages keep what they compiled.
_CACHES = (
    r"(?:\.triton|torchinductor|torch_compile_cache|torch_extensions"
    r"|\.cache/(?:vllm|flashinfer|torch|triton|tvm-ffi|deep_gemm|tilelang|aiter))"
)

SIGNS = [
    make_sign(
        "port-in-use",
        r"^.*(?:\[Errno 98\]|[Aa]ddress already in use).*",
        "the server's port is in use: {whole}",
        needs=("[Errno 98]", "ddress already in use"),
    ),
    make_sign(
        "broken-installation",
        r"No CTK flavor installed: expected one or more of (?P<what>\S+)",
        "a Python package of the engine lacks its libraries: {what}",
    ),
    # Python's own words. The engine's processes are spawned, and each imports the program that started the first one.
    make_sign(
        "broken-installation",
        r"An attempt has been made to start a new process before the",
        "the program that starts the engine does so again whenever it is imported, as each of its processes does",
        'put what the program does under `if __name__ == "__main__":`, or install vLLM anew, whose own program has it',
    ),
    make_sign(
        "compile-cache",
        rf"\[Errno (?:2|17|20|39|66|116)\] [^:'\n]{{1,60}}: '(?P<file>[^'\n]{{0,200}}{_CACHES}[^'\n]{{1,200}})'",
        "what an earlier start compiled and kept is gone, or another start removed it: {file}",
        needs=("[Errno ",),
    ),
    # An empty name means that there is no program.
    make_sign(
        "no-compiler",
        r"InductorError: (?P<why>PermissionError: \[Errno 13\] Permission denied: ''|InvalidCxxCompiler: .+)",
        "what compiles the model found no compiler that it can use: {why}",
    ),
    make_sign(
        "no-compiler",
        r"Could not find nvcc(?: and default cuda_home='[^'\n]{1,300}' doesn't exist)?",
        "what compiles kernels for the GPU found no nvcc: {whole}",
        _NVCC_REMEDY,
    ),
    # The words of the shells dash and bash.
    make_sign(
        "no-compiler",
        r"^\S{0,100}sh: (?:line )?\d{1,6}: (?P<program>\S{0,300}nvcc): (?:(?:command )?not found|No such file or directory)",
        "what compiles kernels for the GPU found no {program}",
        _NVCC_REMEDY,
    ),
    # What was compiled and kept lies outside the image, and so does what a host mounts: before the sign of all imports.
    make_sign(
        "compile-cache",
        rf"(?P<file>/\S{{0,300}}{_CACHES}\S{{0,200}}): (?P<why>file too short|invalid ELF header|undefined symbol: \S{{1,200}}"
        r"|cannot \w{1,20} (?:shared object|file)[^\n]{0,80})",
        "what an earlier start compiled and kept is broken, or of another version: {file}: {why}",
        needs=(".so: ",),
    ),
    make_sign(
        "no-permission",
        r"(?P<file>/\S{1,300}): failed to map segment from shared object",
        "{file} is on a file system whose programs may not run (noexec)",
        "let the server's caches and TMPDIR be on a file system that is mounted without noexec",
        needs=(": failed to map segment from shared object",),
    ),
    # After the sign for the driver's own library, which has another remedy.
    make_sign(
        "broken-installation",
        r"^(?:ModuleNotFoundError|ImportError): (?P<why>.+)",
        "a Python package of the engine cannot be imported: {why}",
    ),
    make_sign(
        "compile-cache",
        r"a corrupted compilation artifact|Failed to (?:load|deserialize) (?:the )?(?:compiled|cached) (?:graph"
        r"|artifact|function)s?[^\n]{0,100}",
        "what an earlier start compiled and kept is broken: {whole}",
    ),
    make_sign(
        "compile-cache",
        r"^(?:_pickle\.UnpicklingError|(?:json\.decoder\.)?JSONDecodeError"
        r"|zipfile\.BadZipFile)(?:: (?P<why>[^\n]{1,200}))?$",
        "what an earlier start compiled and kept is broken, or another start was writing it: {whole}",
        through=r"(?:compil|inductor|triton/)",
    ),
    make_sign(
        "no-permission",
        r"OSError: \[Errno 30\] Read-only file system: '(?P<path>[^'\n]{1,300})'",
        "{path} is on a file system that cannot be written",
    ),
    make_sign(
        "no-permission",
        r"getpwuid\(\): uid not found: (?P<user>\d{1,20})",
        "the server's user {user} has no name where it runs, and torch asks for it",
        "set USER and a HOME that the user may write, or run the server as a user that the image knows",
    ),
    make_sign(
        "broken-installation",
        r"Version mismatch: The cluster was started with:",
        "Ray's cluster and the engine have different versions of Ray or Python",
        "start the cluster from the same image or environment as the server",
        of_image=False,
    ),
    make_sign(
        "process-limit",
        r"pthread_create(?: failed|: )[^\n]{0,100}|can't start new thread|BlockingIOError: \[Errno 11\] [^\n]{0,100}"
        r"|what\(\):  Resource temporarily unavailable",
        "the server may not start more threads or processes: {whole}",
    ),
    make_sign(
        "process-limit",
        r"OSError: \[Errno 24\] Too many open files[^\n]{0,100}",
        "the server may not open more files: {whole}",
        "raise the limit of open files (ulimit -n) where the server runs",
    ),
    make_sign(
        "no-compiler",
        r"Assertion error \(\S{0,200}jit/compiler\.hpp:\d+\): (?P<why>[^\n]{1,200})",
        "DeepGEMM could not compile a kernel: {why}",
        _NVCC_REMEDY,
    ),
    make_sign(
        "no-compiler",
        r"Assertion error \(\S{0,200}jit/(?:kernel_runtime|\w{1,40})\.hpp:\d+\): exit_code == 0",
        "a program of CUDA's toolkit that DeepGEMM starts (cuobjdump) failed or is not there",
        "take an image that has CUDA's toolkit with cuobjdump",
    ),
    make_sign(
        "no-compiler",
        r"nvcc fatal\s{0,10}: +(?P<why>[^\n]{1,200})",
        "CUDA's compiler of this host does not do what the engine asks: {why}",
        "take a newer CUDA toolkit where the server runs, or an image that has it",
    ),
    make_sign(
        "no-compiler",
        r"Failed to find C compiler[^\n]{0,100}|CUDA_HOME environment variable is not set"
        r"|fatal error: Python\.h: No such file or directory"
        r"|No such file or directory: '(?P<program>(?:\S{0,200}/)?(?:nvcc|gcc|g\+\+|cc|c\+\+|ninja|ptxas|cuobjdump))'"
        r"|fatal error: (?:cuda|cuda_runtime|cublas_v2|curand|nvrtc|stdio|stdlib)\w{0,20}\.h: No such file or directory"
        r"|\bld: cannot find -l\w{1,40}"
        r"|g?cc: fatal error: [^\n]{1,200}|error: command '\S{0,200}(?:gcc|g\+\+|nvcc)' failed[^\n]{0,100}",
        "what compiles kernels is not there or does not work: {whole}",
        needs=(
            "C compiler",
            "CUDA_HOME",
            "fatal error: ",
            "No such file or directory: '",
            "error: command '",
            "ld: cannot find",
        ),
    ),
    make_sign(
        "broken-installation",
        r"flashinfer-cubin version \((?P<one>[^)\n]{1,40})\) does not match flashinfer version \((?P<other>[^)\n]{1,40})\)",
        "flashinfer is {other} and flashinfer-cubin is {one}",
        "install flashinfer and flashinfer-cubin of one version, or take an image that has them of one",
    ),
    make_sign(
        "engine-bug",
        r"'_OpNamespace' '_C' object has no attribute '(?P<op>fused_qk_norm_rope|get_cuda_view_from_cpu_tensor|permute_cols)'",
        "vLLM calls {op}, which only its builds for CUDA have",
    ),
    make_sign(
        "broken-installation",
        r"'_OpNamespace' '(?P<name>\w{1,60})' object has no attribute '(?P<op>\w{1,100})'",
        "vLLM's own compiled library {name} did not load, or lacks {op}",
        "see the log's warning about it; install vLLM anew with the torch that it was built for, or take another image",
    ),
    make_sign(
        "broken-installation",
        r"operator (?P<operator>\w{1,60}::\w{1,60}) does not exist"
        r"|undefined symbol: (?P<name>\S{1,200})|version `(?P<libc>GLIBC\S{1,40})' not found"
        r"|A module that was compiled using NumPy 1\.x cannot be run|mismatches the version that was used to compile PyTorch"
        r"|(?P<file>\S{1,200}\.so[\d.]{0,20}): cannot open shared object file",
        "libraries of the engine do not fit together: {whole}",
        needs=(
            "does not exist",
            "undefined symbol: ",
            "GLIBC",
            "NumPy 1.x",
            "mismatches the version",
            "cannot open shared object file",
        ),
    ),
    make_sign(
        "broken-installation",
        r"^AttributeError: (?:partially initialized )?module '(?P<module>[\w.]{1,100})' has no attribute '(?P<name>\w{1,100})'",
        "packages of the engine do not fit together: {module} has no {name}",
    ),
]
