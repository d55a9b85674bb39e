#!/usr/bin/env bash
# A process worker starts two processes for each flow run, and a third one behind a run that was killed.
#
# Version: prefect 3.9.1, Python 3.11, Linux.
# Guess, written first: the worker starts one process, in which the flow runs; where that is killed, the worker itself reports the
#   crash, since the flow has no hook.
# Seen: a process that supervises stands between the worker and the flow's. Behind a killed run the worker starts another process,
#   which imports the flow to look for hooks, though it has none. With `command` among the job variables, if only the command that
#   is the default, there is one process for a run, and none behind it.
# Why: without a command the worker prepares a workspace for the run (WorkspaceResolvingEngineCommandStarter), and its hooks run
#   there (WorkspaceHookRunner); with one it starts that command.
# Cost to us: 2.5 s of CPU and 82 MiB for each run of a host, 8 s behind each one that crashed, and a second report of the crash
#   some seconds after the first.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check prefect==3.9.1
export PREFECT_HOME="$folder/home" PREFECT_LOGGING_LEVEL=CRITICAL PREFECT_SERVER_ANALYTICS_ENABLED=false PATH="$folder/venv/bin:$PATH"

cat > "$folder/flows.py" <<'PY'
import os
import signal
from pathlib import Path

from prefect import flow


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@flow
def told(name: str, killed: bool):
    """Write the commands of this process and of all above it, up to the worker."""
    lines, pid = [], os.getpid()
    while "worker start" not in command(pid):
        lines.append(command(pid))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    Path(__file__).with_name(name).write_text("\n".join(lines))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
PY

cat > "$folder/try.py" <<'PY'
"""Runs each deployment, killed and not, and counts the processes of the worker that were seen while it ran and ten seconds after."""

import sys
import time
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

folder, worker = Path(sys.argv[2]), int(sys.argv[3])


def below(pid):
    try:
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return {}
    found = {}
    for child in children:
        try:
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found |= below(child)
    return found


def named(commands):
    kinds = {"_workspace_supervisor": "supervisor", "hook": "hook", "engine": "engine"}
    return [next((kind for word, kind in kinds.items() if word in each), each) for each in commands]


with SyncPrefectClient(sys.argv[1]) as client:
    flow = client.create_flow_from_name("told")
    for name, variables in (("plain", {}), ("command", {"command": f"{sys.executable} -m prefect.engine"})):
        deployment = client.create_deployment(
            flow, name, entrypoint="flows.py:told", work_pool_name="pool", path=str(folder), job_variables=variables,
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}],
        )
        for killed in (False, True):
            file = f"{name}-{killed}"
            run = client.create_flow_run_from_deployment(deployment, parameters={"name": file, "killed": killed}).id
            seen, over = {}, None
            while over is None or time.monotonic() < over:
                seen |= below(worker)
                if over is None and client.read_flow_run(run).state.is_final():
                    over = time.monotonic() + 15
                time.sleep(0.05)
            state = client.read_flow_run(run).state.name
            print(name, state, "above the flow:", *named((folder / file).read_text().splitlines()[1:]) or ["nothing"],
                  "| behind it:", *(["hook"] if "hook" in named(seen.values()) else ["nothing"]), flush=True)
PY

port=$("$folder/venv/bin/python" -c 'import socket; probe = socket.socket(); probe.bind(("127.0.0.1", 0)); print(probe.getsockname()[1])')
export PREFECT_API_URL="http://127.0.0.1:$port/api"
prefect server start --host 127.0.0.1 --port "$port" > "$folder/server.log" 2>&1 &
for _ in $(seq 120); do
  "$folder/venv/bin/python" -c "import urllib.request; urllib.request.urlopen('$PREFECT_API_URL/health')" 2>/dev/null && break
  sleep 1
done
cd "$folder"
prefect work-pool create pool --type process > /dev/null
prefect worker start --pool pool --name worker > "$folder/worker.log" 2>&1 &
"$folder/venv/bin/python" "$folder/try.py" "$PREFECT_API_URL" "$folder" $! | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
plain Completed above the flow: supervisor | behind it: nothing
plain Crashed above the flow: supervisor | behind it: hook
command Completed above the flow: nothing | behind it: nothing
command Crashed above the flow: nothing | behind it: nothing
SEEN
echo "as written above"
