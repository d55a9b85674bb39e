"""lm-eval in a process of its own, which measures one task block by block and so imports and loads only once.

`lm_eval_process.Asking` puts its orders as files into a folder, the letter box, which is all that the worker may write to. The
worker's first answer is `task.json`: what the task is, or why it cannot be measured. For each `NAME.order` the worker writes
lm-eval's own files into the folder NAME, and then `NAME.done`. It ends with an exit code other than 0 as soon as anything goes
wrong.
"""

import hashlib
import json
import logging
import math
import random
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from vllm_qualify.answers import AGENT
from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence.accuracy import letters
from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.blocks import parts_of
from vllm_qualify.evidence.accuracy.lm_eval_task import LoadedTask
from vllm_qualify.evidence.accuracy.thinking import REPLIES, Reply, split_thinking
from vllm_qualify.evidence.accuracy.tools import questions, scoring
from vllm_qualify.recipe.accuracy import USUAL_TOKENS
from vllm_qualify.recipe.load import SEEDS

POLL_S = 0.02


def main(letter_box: Path) -> None:
    job = letters.Job.model_validate_json((letter_box / letters.JOB).read_bytes())
    worker = _Worker(job, letter_box)
    while True:
        for path in sorted(letter_box.glob(f"*.{letters.ORDER}")):
            order = letters.Order.model_validate_json(path.read_bytes())
            path.unlink()
            worker.measure(order, path.with_suffix(""))
            path.with_suffix(".done").touch()
        # The two talk by files, because the guard uses the worker's standard input.
        time.sleep(POLL_S)


class _Worker:
    def __init__(self, job: letters.Job, letter_box: Path) -> None:
        # Import everything that the first block needs while the server loads.
        import lm_eval.evaluator
        import lm_eval.models.openai_completions  # noqa: F401  (imported for its own sake)
        from lm_eval.utils import setup_logging

        setup_logging("INFO")
        self.job, self.settings, self.failed, self.seeded_by, self.drawn = job, job.task.settings, 0, "", ""
        self.replies: list[Reply] = []
        self.members: list[letters.Member] = []
        internals.keep_templates()
        internals.send_agent(AGENT)
        # As lm-eval does before it loads a task: some tasks shuffle their choices while they load.
        random.seed(self.settings.seed)
        np.random.seed(self.settings.seed)
        internals.seed_language_detection(self.settings.seed)
        self.task = LoadedTask(job, letter_box)
        with self.task.refusing_faults():
            self.task.load()
            self._introduce_task()

    def _introduce_task(self) -> None:
        """Tell what the task is. How members of a group ask is known once lm-eval has made their prompts."""
        tasks = self.task.tasks
        if not self.task.found.is_group:
            self.task.tell(letters.TaskReply(available=len(self.task.first.eval_docs)))
            if self.task.generates:
                self._make_prompts()
            return
        if empty := [name for name, task in tasks.items() if not len(task.eval_docs)]:
            problem = f"of the group '{self.job.task.name}', {', '.join(empty[:8])} has no questions"
            self.task.refuse(problem, "give it some, or measure a group of your own in a task_folder, without it")
        self._make_prompts()
        self.members = [internals.describe_member(name, task) for name, task in tasks.items()]
        available = sum(member.questions for member in self.members)
        self.task.tell(letters.TaskReply(available=available, members=tuple(self.members)))

    def _make_prompts(self) -> None:
        """Prepare what a block needs without a server: lm-eval begins a block of each task, and is stopped at its prompts."""
        model = self.model if self.task.generates else internals.model_without_server()
        for name in self.task.tasks:
            self.task.reading = name
            with suppress(internals.MadeError):
                self._evaluate_questions({name: []}, None, model, {})

    def measure(self, order: letters.Order, folder: Path) -> None:
        from lm_eval.loggers import EvaluationTracker

        folder.mkdir()
        tracker = EvaluationTracker(output_path=str(folder / "results.json"))
        self.failed, self.seeded_by, self.drawn, self.replies = 0, order.seeded_by, order.drawn, []
        # In ascending order: lm-eval takes the n-th of them for the task's n-th.
        of_members = {part.task: part.questions for part in parts_of(self.members, order.questions)}
        asked = of_members or {self.job.task.name: sorted(order.questions)}
        results = self._evaluate_questions(asked, tracker, self.model, self.model_args)
        letters.write_whole(folder / letters.TRIED, letters.Tried(failed=self.failed))
        if self.task.generates:
            write_plain(folder / REPLIES, "".join(f"{reply.model_dump_json()}\n" for reply in self.replies).encode())
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in asked:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        # lm-eval only logs that it could not save them.
        if not any(folder.glob("results_*.json")) or len(list(folder.glob("samples_*.jsonl"))) != len(asked):
            sys.exit("lm-eval could not save its results")

    def _evaluate_questions(self, asked: dict[str, list[int]], tracker: Any, model: Any, model_args: dict[str, Any]) -> Any:
        """Run lm-eval on questions of some tasks. Without questions it only makes the prompts, and raises MadeError.

        `model_args` are only recorded: the model is built already.
        """
        from lm_eval import simple_evaluate

        seed = self.settings.seed
        return simple_evaluate(
            model=model,
            model_args=model_args,
            tasks=[self.task.tasks[name] for name in asked],
            task_manager=self.task.found.manager,
            samples=asked,
            num_fewshot=self.settings.num_fewshot,
            gen_kwargs=self._gen_kwargs or None,
            system_instruction=self.settings.system_prompt,
            apply_chat_template=self.settings.api == "chat",
            evaluation_tracker=tracker,
            # we compute the intervals ourselves
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )

    @property
    def _gen_kwargs(self) -> dict[str, Any]:
        """The options that override the task's own. lm-eval lets a task's budget override that of the model."""
        if self.settings.max_gen_toks is None:
            return self.job.task.gen_kwargs
        own = [task.get_config("generation_kwargs") or {} for task in self.task.tasks.values()]
        named = {next((name for name in ("max_tokens", "max_gen_toks") if name in each), None) for each in own}
        return self.job.task.gen_kwargs | {name: self.settings.max_gen_toks for name in named if name}

    @cached_property
    def model(self) -> Any:
        """lm-eval's model, built on first use: for likelihoods it asks the server, which need not answer before a block."""
        from lm_eval.api.registry import get_model

        model = get_model("local-chat-completions" if self.settings.api == "chat" else "local-completions")(**self.model_args)
        internals.refuse_redirects(model, self.job.url)
        internals.send_no_key(model)
        internals.keep_tokens(model)
        internals.count_failed(model, self._count_failed)
        # First of all: what follows sees the prompt as lm-eval hashes it.
        if self.task.calls_tools:
            internals.change_requests(model, questions.request_of)
        if pictures := self.task.pictures:
            internals.change_requests(model, lambda messages: (pictures.put_into(messages), {}))
        if self.task.generates:
            internals.read_replies(model, self._read_reply)
            internals.order_requests(model, self._draw_order)
        if self.job.task.sampling is not None:
            internals.change_requests(model, self._add_seed)
        return model

    def _read_reply(self, prompt: str, choice: dict[str, Any], text: str | None) -> str | None:
        reply, answer = split_thinking(prompt, choice, text, self.settings.think_end)
        if self.task.calls_tools:
            answer = scoring.text_of(choice, answer)
            reply = reply.model_copy(update={"is_empty": not (answer or "").strip()})
        self.replies.append(reply)
        return answer

    def _draw_order(self, count: int) -> list[int]:
        """The order of a block's requests: of a block without a drawn one, lm-eval's own."""
        places = range(count)
        return (
            sorted(places, key=lambda place: hashlib.sha256(f"{self.drawn} {place}".encode()).digest())
            if self.drawn
            else list(places)
        )

    def _add_seed(self, messages: Any) -> tuple[Any, dict[str, int]]:
        """Give a question's answer a seed of its own, and another one each time that it is asked.

        lm-eval sends one seed with all requests. Then a question would get the same answer again, and what chance does to one
        question it would do to the others.
        """
        about = json.dumps([self.settings.seed, self.seeded_by, messages]).encode()
        return messages, {"seed": int.from_bytes(hashlib.sha256(about).digest()[:8]) % SEEDS}

    def _count_failed(self, calls: int) -> None:
        self.failed += calls

    @cached_property
    def model_args(self) -> dict[str, Any]:
        chat = self.settings.api == "chat"
        return {
            "model": self.job.model,
            "base_url": f"{self.job.url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": self.job.task.num_concurrent,
            "max_gen_toks": self.settings.max_gen_toks or USUAL_TOKENS,
            # lm-eval must not give up an answer that comes within the step's time limit. Its default is 300 s.
            "timeout": math.ceil(self.settings.time_limit_s) + 1,
            "max_retries": letters.MOST_TRIES,
            # For text the server tokenizes, so the worker needs neither torch nor the model's tokenizer.
            **({"tokenizer_backend": None, "tokenized_requests": False} if self.task.generates else self._server_tokens()),
        }

    def _server_tokens(self) -> dict[str, Any]:
        """Likelihoods need tokens: the server gives them, and its longest context. lm-eval's default for that is 2,048."""
        from lm_eval.utils import check_remote_tokenizer_support

        if not check_remote_tokenizer_support(self.job.url):
            self.task.refuse(
                f"{self.job.task.name} compares likelihoods, for which lm-eval needs the server's tokenizer; it reports none",
                "add `enable-tokenizer-info-endpoint: true` to the server's options",
            )
        reply = httpx.post(f"{self.job.url}/tokenize", json={"model": self.job.model, "prompt": "one"}, timeout=60).json()
        return {"tokenizer_backend": "remote", "tokenized_requests": True, "max_length": reply["max_model_len"]}


if __name__ == "__main__":
    logging.captureWarnings(True)
    main(Path(sys.argv[1]))
