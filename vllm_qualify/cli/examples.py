"""Two examples for each command: its `--help` and the reference of commands show them."""

from collections.abc import Iterator
from typing import NamedTuple

import typer

CELL = "reference/bf16/cpu/balanced"
RUN, EARLIER = "20261130T173203Z-5b685e", "20261123T080015Z-0c41d2"


class Example(NamedTuple):
    """What is typed after `vllm-qualify`, and what it is for."""

    arguments: str
    meaning: str


EXAMPLES: dict[str, tuple[Example, Example]] = {
    "run": (
        Example("run reference --establish-baseline", "The catalog's small model on the CPU; later runs are compared with it."),
        Example(
            "run mine.yaml --gpu-type h100 --launcher docker --image vllm/vllm-openai:v0.32.0",
            "Your own recipe on an image of a registry.",
        ),
    ),
    "demo": (
        Example("demo", "The reference model, which passes."),
        Example("demo --weights regressed", "Worse weights, which are refused."),
    ),
    "engine install": (
        Example("engine install", "vLLM for this machine's GPUs, or else for its CPU."),
        Example("engine install --cpu --to ~/vllm-engine", "The CPU's build, in a folder of your own."),
    ),
    "engine list": (
        Example("engine list", "What is installed, and which one runs use."),
        Example("engine list --json", "For a script."),
    ),
    "engine remove": (
        Example("engine remove 0.32.0-cpu", "The CPU's build of a version."),
        Example("engine remove 0.31.0-cuda", "A version that no run needs any more."),
    ),
    "rejudge": (
        Example(f"rejudge {RUN}", "Once more by its own gates."),
        Example(f"rejudge {RUN} --recipe stricter.yaml", "By the gates of another recipe."),
    ),
    "publish": (
        Example(f"publish {RUN}", "Into the folder of this machine."),
        Example(f"publish {RUN} --store s3://models/qualified", "Into a bucket."),
    ),
    "prune": (
        Example("prune --keep 20 --older-than-days 90", "Show what would go."),
        Example("prune --keep 20 --older-than-days 90 --delete", "Remove it."),
    ),
    "approve": (
        Example(f"approve {RUN} --by Ada --reason 'all gates pass'", "For as long as the recipe says."),
        Example(f"approve {RUN} --by Ada --reason 'until the next patch' --valid-days 30", "For a month."),
    ),
    "reject": (
        Example(f"reject {RUN} --by Ada --reason 'slower than last week'", "A run of this machine."),
        Example(
            f"reject {RUN} --by Ada --reason 'slower than last week' --store s3://models/qualified", "A run of a fleet's store."
        ),
    ),
    "revoke": (
        Example(f"revoke {CELL} --by Ada --reason 'wrong answers in Hindi'", "The cell's last approval."),
        Example(f"revoke {CELL} --by Ada --reason 'wrong answers in Hindi' --run {EARLIER}", "An earlier one."),
    ),
    "verify": (
        Example("verify exported/approval.json --public-key approver.pem.pub --deep", "A copy; its evidence is judged again."),
        Example(f"verify {CELL} --here ./model --here http://127.0.0.1:8000", "And what is deployed is what was approved."),
    ),
    "doctor": (Example("doctor", "Before the first run."), Example("doctor --clean", "After a run that was killed.")),
    "report show": (
        Example("report show", "The latest run."),
        Example(f"report show {RUN} --store s3://models/qualified --json", "A published run, for a program."),
    ),
    "report diff": (
        Example(f"report diff {EARLIER} {RUN}", "Two runs of this machine."),
        Example(f"report diff {EARLIER} {RUN} --store s3://models/qualified --json", "Two published runs, for a program."),
    ),
    "recipe new": (
        Example("recipe new ./model --gpu-type cpu --output mine.yaml", "Of a folder, for this machine's CPU."),
        Example(
            "recipe new Qwen/Qwen3-8B --gpu-type h100 --input-len 2000 --output-len 300 --users 32 --ttft-p99-ms 800",
            "Of the hub, with your traffic and what you promise.",
        ),
    ),
    "recipe check": (
        Example("recipe check mine.yaml", "With the engine that `run` would use."),
        Example("recipe check mine.yaml --vllm 0.33.0 --against 0.32.0", "Before a new version is tried, and what it changes."),
    ),
    "recipe show": (
        Example("recipe show reference --gpu-type cpu", "What a server would be started with."),
        Example("recipe show mine.yaml --gpu-type h100 --vllm 0.32.0", "For a GPU and a version that this machine lacks."),
    ),
    "recipe bounds": (
        Example(f"recipe bounds {RUN} --loss-that-hurts 0.01", "What it can see, and what it costs to see a loss of 1 %."),
        Example(f"recipe bounds {RUN} --recipe mine.yaml --write", "Add the usual gates to the run's own recipe."),
    ),
    "recipe import": (
        Example("recipe import recipes/Qwen/Qwen3-32B.yaml --output qwen3-32b.yaml", "From a checkout."),
        Example("recipe import Qwen3-32B.json", "From a published file, onto the terminal."),
    ),
    "trace check": (
        Example("trace check requests.jsonl", "What the whole trace asks."),
        Example("trace check requests.jsonl --num-prompts 500", "What a load of its first 500 requests asks."),
    ),
    "trace make": (
        Example("trace make access.jsonl --fields time,input,output --out requests.jsonl", "Of an access log."),
        Example(
            "trace make sharegpt.json --tokenizer model --rate 2 --out requests.jsonl", "Of conversations, two per second."
        ),
    ),
    "data fetch": (
        Example("data fetch mine.yaml", "The data of all tasks into ./data."),
        Example("data fetch mine.yaml --task gsm8k --to /srv/data", "Of one task, into another folder."),
    ),
    "approver key": (
        Example("approver key Ada --file approvers.json", "Ada's first key, or a new one in place of a lost one."),
        Example("approver key Ada", "The same, where VLLM_QUALIFY_APPROVERS_FILE names the file."),
    ),
    "approver serve": (
        Example("approver serve --store s3://models/qualified --file approvers.json", "People decide about everything."),
        Example(
            "approver serve --store s3://models/qualified --file approvers.json --recipe reference",
            "A recipe may approve itself.",
        ),
    ),
    "approved list": (
        Example("approved list", "What this machine's store has."),
        Example("approved list --store s3://models/qualified --json", "What a fleet's store has, for a program."),
    ),
    "approved get": (
        Example(f"approved get {CELL}", "The file for `vllm serve --config`."),
        Example(f"approved get {CELL} --format kubernetes --store s3://models/qualified", "A manifest for a cluster."),
    ),
    "approved export": (
        Example(f"approved export {CELL} exported", "The last approval."),
        Example(f"approved export {CELL} exported --run {EARLIER}", "An earlier one."),
    ),
    "key new": (
        Example("key new approver.pem", "A key with a passphrase, and approver.pem.pub."),
        Example("key new approver.pem --no-passphrase", "Without a passphrase, for a service."),
    ),
}


def add_examples(app: typer.Typer, path: tuple[str, ...] = ()) -> None:
    """Put each command's examples before what else its help ends with. Raises KeyError if a command has none."""
    for command in app.registered_commands:
        words = " ".join([*path, str(command.name or getattr(command.callback, "__name__", ""))])
        shown = [f"  {line}" for line in list_lines(words)]
        command.epilog = "\n".join(["\b", "Examples:", *shown, "", str(command.epilog or "")])
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, (*path, str(group.name)))


def list_lines(words: str) -> Iterator[str]:
    """The examples of the command with this name, as one types them: each below a comment. Raises KeyError."""
    for example in EXAMPLES[words]:
        yield f"# {example.meaning}"
        yield f"vllm-qualify {example.arguments}"
