"""Signs of code that crashed, and refusals whose words say no more."""

from vllm_qualify.engine.failure.signs.sign import make_sign

SIGNS = [
    make_sign(
        "crashed", r"^!+ Segfault encountered !+", "native code of the server crashed with a segmentation fault (SIGSEGV)"
    ),
]

# Words that a cause with a remedy of its own may come with: they count where no sign above is in the log.
GENERAL_SIGNS = [
    make_sign(
        "crashed",
        r"(?:CUDA error|HIP error|CUDA driver error|Triton Error \[\w{1,10}\]|Cuda failure|Failed: (?:Cuda|HIP) error \S{1,200}):? '?(?P<what>[^'\n]{1,200})",
        "native code of the release failed on the GPU: {what}",
    ),
    make_sign(
        "crashed",
        r"(?P<what>CU(?:BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_\w{1,60}|HSA_STATUS_ERROR_\w{1,60}|Memory access fault by GPU node[^\n]{0,100})",
        "native code of the release failed on the GPU: {what}",
    ),
    make_sign(
        "engine-bug",
        r"torch\._(?:inductor|dynamo)\.exc\.(?P<what>\w{1,60}(?:: [^\n]{1,300})?)",
        "the model could not be compiled: {what}",
        "report it to vLLM with the log; enforce-eager starts without compiling, and is slower",
    ),
    make_sign(
        "no-compiler", r"ninja: build stopped: [^\n]{1,100}|Ninja build failed[^\n]{0,100}", "kernels for the GPU could not be built: {whole}"
    ),
    make_sign(
        "broken-installation",
        r"^AttributeError: (?:partially initialized )?module '(?P<module>[\w.]{1,100})' has no attribute '(?P<name>\w{1,100})'",
        "packages of the engine do not fit together: {module} has no {name}",
    ),
    make_sign(
        "refused-configuration",
        r"^ +(?:Value error|Assertion failed), (?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the configuration: {why}",
    ),
]
