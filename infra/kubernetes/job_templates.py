"""The base job templates of the fleet's Kubernetes work pools: one template, and the differences between GPU types.

    python -m infra.kubernetes.job_templates FOLDER --image REGISTRY/vllm-qualify-engine@sha256:DIGEST

writes FOLDER/<pool>.json for every pool: for the Helm chart of the worker, or `prefect work-pool create --base-job-template`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_qualify.recipe.gpu_types import POOL_PRODUCTS

TEMPLATE = Path(__file__).with_name("job_template.json")
CPU_POOL = "cpu"
POOLS = (*POOL_PRODUCTS, CPU_POOL)
# A whole machine, as on a host with Docker: a neighbour on its other GPUs would disturb what is measured.
GPUS_OF_A_NODE = 8
GPU_RESOURCE = "nvidia.com/gpu"

Document = dict[str, Any]


def job_template(pool: str, image: str) -> Document:
    """The pool's base job template, with the image that its jobs run by default. Raises KeyError for an unknown pool."""
    template: Document = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    template["variables"]["properties"]["image"]["default"] = image
    return _on_cpu(template) if pool == CPU_POOL else _on_gpus(template, POOL_PRODUCTS[pool])


def _on_gpus(template: Document, product: str) -> Document:
    gpus = {"title": "GPUs", "type": "integer", "minimum": 1, "default": GPUS_OF_A_NODE, "description": "A whole node's."}
    variables = template["variables"]["properties"]
    variables["gpus"] = gpus
    variables["gpu_product"] = {"title": "GPU product", "type": "string", "default": product}
    pod = _pod(template)
    pod["nodeSelector"]["nvidia.com/gpu.product"] = "{{ gpu_product }}"
    pod["tolerations"] = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    pod["containers"][0]["resources"]["limits"][GPU_RESOURCE] = "{{ gpus }}"
    return template


def _on_cpu(template: Document) -> Document:
    variables = template["variables"]["properties"]
    variables["architecture"] = {"title": "Architecture", "type": "string", "default": "amd64"}
    variables["memory_request"]["default"] = "16Gi"
    variables["shm_size"]["default"] = "4Gi"
    _pod(template)["nodeSelector"]["kubernetes.io/arch"] = "{{ architecture }}"
    return template


def _pod(template: Document) -> Document:
    pod: Document = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    return pod


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the base job template of every Kubernetes work pool.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--image", required=True, help="built by infra/image/engine.Dockerfile; best by digest")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for pool in POOLS:
        text = json.dumps(job_template(pool, arguments.image), indent=2)
        (arguments.folder / f"{pool}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
