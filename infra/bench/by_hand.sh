#!/usr/bin/env bash
# The commands that the guides tell people to type: serve, curl, lm_eval, vllm bench serve; one after another.
#
#   by_hand.sh ENGINE CONFIG TASKS DIR    ENGINE has vLLM (bin/vllm), CONFIG is the server's config file, TASKS a folder with an
#                                         lm-eval task; DIR gets all that is written, held with the times of
#                                         launch, ready and end, and marks with that of each step's begin
#
# shellcheck disable=SC2153 # named by the environment
# The environment names the rest: PORT, MODEL, TASK, QUESTIONS, SHOTS, CONCURRENT, MAX_GEN_TOKS, INPUT_LEN, OUTPUT_LEN, CLIENTS,
# PROMPTS, WARMUPS, REPEATS, LM_EVAL.
set -euo pipefail

readonly ENGINE=$1 CONFIG=$2 TASKS=$3 DIR=$4
readonly URL=http://127.0.0.1:$PORT
cd "$DIR"

main() {
  date +%s.%N > held
  "$ENGINE/bin/vllm" serve --config "$CONFIG" > server.log 2>&1 &
  SERVER=$!
  trap 'kill "$SERVER" 2> /dev/null || true; wait "$SERVER" || true' EXIT
  until complete "1" 1 > /dev/null 2>&1; do
    kill -0 "$SERVER" || exit 1
    sleep 1 # people look about as often
  done
  date +%s.%N >> held
  mark smoke
  complete "San Francisco is a" 20 > smoke.json
  mark accuracy
  accuracy > lm_eval.log 2>&1
  for repeat in $(seq "$REPEATS"); do
    mark "repeat $repeat"
    load "$repeat" > "bench-$repeat.log" 2>&1
  done
  mark end
  kill "$SERVER"
  wait "$SERVER" || true
  date +%s.%N >> held
}

mark() {
  echo "$(date +%s.%N) $1" >> marks
}

complete() {
  curl --silent --show-error --fail "$URL/v1/completions" --header 'Content-Type: application/json' \
    --data "{\"model\": \"reference\", \"prompt\": \"$1\", \"max_tokens\": $2, \"temperature\": 0}"
}

accuracy() {
  local arguments="model=reference,base_url=$URL/v1/completions,num_concurrent=$CONCURRENT,max_gen_toks=$MAX_GEN_TOKS"
  "$LM_EVAL" --model local-completions --model_args "$arguments,tokenizer_backend=None,tokenized_requests=False" \
    --tasks "$TASK" --include_path "$TASKS" --num_fewshot "$SHOTS" --limit "$QUESTIONS" --output_path . --log_samples
}

load() {
  "$ENGINE/bin/vllm" bench serve --backend openai --endpoint /v1/completions --base-url "$URL" \
    --model reference --tokenizer "$MODEL" --dataset-name random --ignore-eos --temperature 0 \
    --random-input-len "$INPUT_LEN" --random-output-len "$OUTPUT_LEN" --num-prompts "$PROMPTS" --max-concurrency "$CLIENTS" \
    --num-warmups "$WARMUPS" --seed "$(($1 - 1))" --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 \
    --save-result --save-detailed --result-dir . --result-filename "bench-$1.json"
}

main
