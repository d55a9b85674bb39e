# A vLLM image with the project beside it, for Kubernetes, where no Docker Engine is at hand: the job's pod is the server's
# machine, and the `process` launcher starts the image's own vLLM. From the root of a checkout:
#
#   docker build --file infra/image/engine.Dockerfile \
#     --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0@sha256:… --tag vllm-qualify-engine:v0.32.0 .
#
# Give vLLM's image by the digest that was qualified, or that `python -m infra.lock_images` writes here.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84
ARG PYTHON=3.11

# vLLM's image has another Python and other pins (docs/design/0001): the project brings a Python of its own, which needs
# nothing of the distribution that it lands in.
FROM ${BASE_IMAGE} AS orchestrator
ARG PYTHON
WORKDIR /opt/vllm-qualify
ENV UV_PYTHON_INSTALL_DIR=/opt/python UV_LINK_MODE=copy UV_NO_CACHE=1
COPY infra/requirements/orchestrator.txt infra/requirements/orchestrator.txt
RUN sed -n '/^uv==/,/[^\\]$/p' infra/requirements/orchestrator.txt > /tmp/uv.txt \
 && pip install --no-cache-dir --no-deps --require-hashes --requirement /tmp/uv.txt \
 && uv python install "$PYTHON" \
 && uv venv --python "$PYTHON" --python-preference only-managed .venv \
 && uv pip install --python .venv --no-deps --require-hashes --requirement infra/requirements/orchestrator.txt
COPY pyproject.toml README.md LICENSE ./
COPY vllm_qualify vllm_qualify
COPY tasks tasks
COPY flows flows
COPY deployments deployments
RUN uv pip install --python .venv --no-deps --no-build-isolation .

FROM ${VLLM_IMAGE}
USER root
COPY --from=orchestrator /opt/python /opt/python
COPY --from=orchestrator /opt/vllm-qualify /opt/vllm-qualify
# The form of an environment's folder that VLLM_QUALIFY_ENGINE wants, wherever the image keeps its vLLM. Not links: a Python
# that is started through a link outside its own environment does not find that environment.
RUN mkdir --parents /opt/vllm-engine/bin \
 && for program in vllm python3; do \
      printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v "$program")" > "/opt/vllm-engine/bin/${program%3}" || exit 1; \
    done \
 && chmod 0755 /opt/vllm-engine/bin/* \
 && /opt/vllm-engine/bin/python -c 'import importlib.metadata as m; m.version("vllm")' \
 && useradd --uid 10001 --create-home qualify \
 && install --directory --owner qualify --group qualify /var/lib/vllm-qualify /var/cache/huggingface

# The project's programs come last on the path: what vLLM starts by name stays the image's own.
ENV PATH=$PATH:/opt/vllm-qualify/.venv/bin \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/huggingface \
    VLLM_QUALIFY_HOME=/var/lib/vllm-qualify \
    VLLM_QUALIFY_ENGINE=/opt/vllm-engine \
    DO_NOT_TRACK=1 \
    GX_ANALYTICS_ENABLED=false \
    HF_HUB_DISABLE_TELEMETRY=1 \
    VLLM_DO_NOT_TRACK=1 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /opt/vllm-qualify
USER 10001:10001
# vLLM's image would take the job's command as options of `vllm serve`.
ENTRYPOINT []
CMD ["vllm-qualify", "doctor"]
