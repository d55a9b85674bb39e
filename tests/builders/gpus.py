"""An H200 as NVML and nvidia-smi read it."""

from pathlib import Path

from vllm_qualify.engine.gpu import Fingerprint

CAPTURED = Path(__file__).parents[1] / "engine" / "captured_gpu"
SMI = (CAPTURED / "nvidia-smi.csv").read_text()
H200 = Fingerprint(
    gpu_type="h200",
    name="NVIDIA H200",
    form_factor="SXM",
    count=1,
    memory_mib=143_771,
    compute_capability="9.0",
    driver="580.159.04",
    devices=[0],
)
