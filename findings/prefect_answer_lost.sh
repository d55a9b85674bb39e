#!/usr/bin/env bash
# A flow loses its result where one answer of Prefect's server is lost, though the client asks again.
#
# Version: prefect 3.9.1, Python 3.11; 3.8.8 did the same.
# Guess, written first: the client sends each state with a transition id, so a repeated request is recognized by the server,
#   and the flow ends as if no answer had been lost.
# Seen: the server recognizes the repeated request and sends back the state as it has it, which is without its data. The client
#   takes that state for the flow's own. A flow that returned Completed(data=[1]) has no result (MissingResult), and one that
#   returned Failed(data=[1]) gives an exception in its place. The server shows both states as they should be.
#   A flow that returns a plain value keeps it.
# Why: propose_state returns the server's state if its status is REJECT; the rule PreventDuplicateTransitions rejects.
# Cost to us: a report that was published was a traceback for the user, whenever Prefect's server was slow for a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check prefect==3.9.1
export PREFECT_HOME="$folder/home" PREFECT_LOGGING_LEVEL=CRITICAL PREFECT_SERVER_ANALYTICS_ENABLED=false

cat > "$folder/lost.py" <<'PY'
"""Flows on a real server; a proxy passes all on and loses one answer: that to each flow's final state."""

import socket
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Failed

BEHIND = sys.argv[1]
asked = []


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.pass_on()

    def do_POST(self):
        self.pass_on()

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request = urllib.request.Request(BEHIND + self.path, body or None, {"content-type": "application/json"}, method=self.command)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        status, content = answer.status, answer.read()
        if self.path.endswith("/set_state"):
            asked.append(self.path)
            if len(asked) == 2:  # The first is of the state Running.
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@flow
def completed():
    return Completed(data=[1])


@flow
def failed():
    return Failed(name="NotGoodEnough", data=[1])


@flow
def plain():
    return [1]


def result(a_flow):
    asked.clear()
    try:
        found = a_flow() if a_flow is plain else a_flow(return_state=True).result(raise_on_failure=False)
    except Exception as error:  # Whatever it is, its type is what was seen, and is printed.
        found = error
    assert len(asked) == 3, (asked, found)  # Running, the final state, and the final state again.
    return f"[1] became {found if isinstance(found, list) else type(found).__name__}"


proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
threading.Thread(target=proxy.serve_forever, daemon=True).start()
with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{proxy.server_port}/api"}):
    for each in (completed, failed, plain):
        print(f"{each.name}: {result(each)}", flush=True)
PY

port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/prefect" server start --host 127.0.0.1 --port "$port" > "$folder/server.log" 2>&1 &
for _ in $(seq 240); do
  curl -sf "http://127.0.0.1:$port/api/health" > "$folder/health" && break
  sleep 0.5
done
"$folder/venv/bin/python" "$folder/lost.py" "http://127.0.0.1:$port" 2> "$folder/errors.log" | tee "$folder/seen" || { tail -n 20 "$folder/errors.log"; exit 1; }
diff "$folder/seen" - <<'SEEN'
completed: [1] became MissingResult
failed: [1] became FailedRun
plain: [1] became [1]
SEEN
echo "as written above"
