#!/usr/bin/env bash
# lm-eval asks a refused request again as if the server were away, and ends with the words of another request.
#
# Version: lm-eval 0.4.13, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): a request that the server refuses for good (HTTP 400: the prompt is too long) is not asked again, and lm-eval ends
#   with the server's reason.
# Seen: each refused request is asked again as often as one that got no answer: three times. lm-eval ends with exit code 1 and a traceback whose last
#   line is aiohttp's ClientResponseError, without the reason: the reason stands once in a warning, above the lines of all requests that were under way.
# Why: TemplateAPI retries whatever raise_for_status raises (models/api_models.py), and the body is only logged.
# Cost to us: "lm-eval ended with exit code 1, see the last lines of its log" was all that a user was told of a context that was too short.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13'
cat > "$folder/server.py" <<'PY'
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Refuses(BaseHTTPRequestHandler):
    """Every completion is refused, in vLLM's words."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        with open(sys.argv[1], "a") as asked:
            asked.write("asked\n")
        body = json.dumps({"error": {"message": "This model's maximum context length is 256 tokens.", "type": "BadRequestError", "code": 400}}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
print(server.server_port, flush=True)
server.serve_forever()
PY
mkdir "$folder/tasks"
printf '{"question": "1 + 1?", "answer": "2"}\n' > "$folder/data.jsonl"
cat > "$folder/tasks/made.yaml" <<YAML
task: made_sum
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n"]}
metric_list: [{metric: exact_match}]
YAML
"$folder/venv/bin/python" "$folder/server.py" "$folder/asked" > "$folder/port" &
until [ -s "$folder/port" ]; do sleep 0.1; done
code=0
HF_DATASETS_CACHE="$folder/cache" OPENAI_API_KEY=none "$folder/venv/bin/lm_eval" --model local-completions --tasks made_sum --include_path "$folder/tasks" \
  --model_args "model=made,base_url=http://127.0.0.1:$(cat "$folder/port")/v1/completions,tokenizer_backend=None,tokenized_requests=False,num_concurrent=2" \
  > "$folder/log" 2>&1 || code=$?
asked=$(wc -l < "$folder/asked")
last=$(grep -aoE '^[A-Za-z_.]*(Error|Exception)\b.*' "$folder/log" | tail -1)
echo "exit code $code, asked $asked times; the last line: ${last:0:160}"
[ "$code" = 1 ] && [ "$asked" = 3 ] || { tail -30 "$folder/log"; exit 1; }
case $last in *"maximum context length"*) exit 1 ;; *ClientResponseError*) ;; *) exit 1 ;; esac
grep -q "maximum context length is 256" "$folder/log"
echo "as seen before"
