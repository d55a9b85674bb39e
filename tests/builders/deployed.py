"""What is deployed: folders of weights, and servers that tell what they are."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.approval.builder import Change
from tests.builders.changed import changed
from vllm_qualify.engine.environment import content_of, digest_of
from vllm_qualify.report.model import Report

WEIGHTS = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 40, "README.md": b"# A model\n"}
CACHE_PAGE = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="False",engine="0",\
gpu_memory_utilization="0.9",num_gpu_blocks="NUMBER"} 1.0
"""


def write_weights(folder: Path) -> Path:
    """A folder with the files of WEIGHTS."""
    folder.mkdir(parents=True)
    for name, body in WEIGHTS.items():
        (folder / name).write_bytes(body)
    return folder


def of_folder(folder: Path) -> Change:
    """The report of a run that served this folder as it is now."""
    files = content_of(folder)

    def change(report: Report) -> Report:
        release = {"model": str(folder), "revision": digest_of(files), "files": files}
        report = changed(report, "plan.cell.release", **release)
        return changed(report, "plan.server", model=str(folder), revision=None, parts=[])

    return change


@contextmanager
def answering(replies: Mapping[str, bytes | tuple[int, bytes]]) -> Iterator[str]:
    """A server with these replies by their path, alone or with a status; 404 for any other path. Its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            reply = replies.get(self.path, (404, b""))
            status, body = reply if isinstance(reply, tuple) else (200, reply)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def told_replies(report: Report, **card: object) -> dict[str, bytes | tuple[int, bytes]]:
    """What vLLM serves of itself for the report's plan, with changes to its model's card."""
    server = report.plan.server
    listed = {"id": server.served_model_name, "object": "model", "root": server.model, "max_model_len": 8192} | card
    return {
        "/version": json.dumps({"version": report.plan.cell.release.engine.version}).encode(),
        "/v1/models": json.dumps({"object": "list", "data": [listed]}).encode(),
        "/metrics": CACHE_PAGE.replace("NUMBER", "2000").encode(),
    }
