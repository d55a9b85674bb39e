#!/usr/bin/env bash
# lm-eval sends a chat the first four of a task's stop texts, and all of them in a completion; what it does not send it does not apply either.
#
# Version: lm-eval 0.4.13, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): a task's `until` ends replies alike by both interfaces: what a server cannot be asked
#   for, lm-eval cuts itself.
# Seen: of five texts local-chat-completions sends four, without a warning, and a reply that has the fifth is scored with all that follows it. local-completions sends all five, which a server
#   that takes four (OpenAI's, vLLM since 0.28) refuses.
# Why: `stop[:4]` in LocalChatCompletion._create_payload, and none in LocalCompletionsAPI (models/openai_completions.py).
# Cost to us: HumanEval has five. By chats its programs ran on behind the end, and by completions each request was refused: the recipe's check now says so before a server starts.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13'
cat > "$folder/server.py" <<'PY'
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPLY = "42 print"


class Answers(BaseHTTPRequestHandler):
    """Every reply is the same; the stop texts of each request are kept."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(sys.argv[1], "a") as file:
            file.write(f"{self.path.rpartition('/')[2]} {len(asked['stop'])}\n")
        choice = {"index": 0, "finish_reason": "stop", "text": REPLY, "message": {"role": "assistant", "content": REPLY}}
        body = json.dumps({"id": "1", "object": "made", "model": "made", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
PY
mkdir "$folder/tasks"
printf '{"question": "6 * 7?", "answer": "42"}\n' > "$folder/data.jsonl"
cat > "$folder/tasks/made.yaml" <<YAML
task: made_product
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["class", "def", "#", "if", " print"]}
metric_list: [{metric: exact_match}]
YAML
"$folder/venv/bin/python" "$folder/server.py" "$folder/asked" > "$folder/port" &
until [ -s "$folder/port" ]; do sleep 0.1; done
ask() {
  HF_DATASETS_CACHE="$folder/cache" OPENAI_API_KEY=none "$folder/venv/bin/lm_eval" --tasks made_product --include_path "$folder/tasks" "$@" > "$folder/log" 2>&1 \
    || { tail -30 "$folder/log"; exit 1; }
  grep -aoE 'exact_match.*' "$folder/log" | tail -1 | tr -s ' '
  # Its one warning of stop texts is that it does not know the model's own end.
  if grep -aE "WARNING|ERROR" "$folder/log" | grep -av "EOS string" | grep -aiqE "\bstop|until"; then tail -30 "$folder/log"; exit 1; fi
}
at="http://127.0.0.1:$(cat "$folder/port")/v1"
ask --model local-chat-completions --apply_chat_template --model_args "model=made,base_url=$at/chat/completions" | tee "$folder/score"
ask --model local-completions --model_args "model=made,base_url=$at/completions,tokenizer_backend=None,tokenized_requests=False"
echo "stop texts of each request:"
cat "$folder/asked"
[ "$(cat "$folder/asked")" = "$(printf 'completions 4\ncompletions 5')" ]
grep -qE '\| *0\|' "$folder/score"
echo "as seen before"
