"""What a server is asked that is no load: the smoke prompt, lm-eval's tasks, and texts to be scored."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.roles import EFFORT, NOTE, PLACE, WORK, Settings
from vllm_qualify.recipe.sampling import Sampling, TemplateValue
from vllm_qualify.recipe.values import Count, CountOrZero, Flag, Seconds, Share, TaskName, Text

# A baseline answers each question at least this often. With fewer answers, its own noise dominates a comparison.
LEAST_REPETITIONS = 4
# The longest reply where neither the recipe nor the task says one: lm-eval's own default.
USUAL_TOKENS = 256
# The tasks that this project makes itself: contexts of so many tokens, prompt and reply. Their replies have at most as many as
# RULER's, if the recipe says no other length.
LONG = re.compile(r"long_([0-9]{1,40})")
LONG_REPLY_TOK = 128
LEAST_CONTEXT_TOK, MOST_CONTEXT_TOK = 512, 10_000_000
# The least that a prompt of theirs can be.
LEAST_LONG_PROMPT_TOK = 320


class Smoke(Settings):
    """The fixed prompt, asked twice at temperature 0."""

    prompt: Annotated[Text, WORK] = Field(description="asked twice, at temperature 0")
    max_tokens: Annotated[Count, WORK] = Field(20, description="longest reply")
    time_limit_s: Annotated[Seconds, EFFORT] = Field(120.0, description="for each request")


class Questions(Settings):
    """Local files in place of the hub's data set: JSON lines with the fields that the task's own data has.

    A picture is a text, `data:image/png;base64,…`. Where each task of a group has data of its own, a path is that of a folder
    with one file for each, `TASK.jsonl`.
    """

    test: Annotated[Text, PLACE] = Field(description="path of the questions, a file or a folder")
    shots: Annotated[Text | None, PLACE] = Field(
        None,
        description="path of the solved examples, a file or a folder; none for a task that has its own, or with"
        " `num_fewshot: 0`",
    )


class Accuracy(Settings):
    """One lm-eval task. The model writes text, in completions or in chats, or its likelihoods choose among given answers.

    If a gate compares with a baseline, the questions are asked again until the comparison is decided. A reply that is empty
    or never came is a wrong answer.
    """

    task: Annotated[TaskName, WORK] = Field(
        "gsm8k",
        description="a task or a group of tasks of lm-eval, or of a YAML file in `task_folder`. A group has one score, over all"
        " its questions. `long_8192` asks about long texts: prompt and reply have so many tokens",
    )
    api: Annotated[Literal["completions", "chat"], WORK] = Field(
        "completions", description="how the server is asked; a chat has the server's own template, and the examples as turns"
    )
    num_fewshot: Annotated[CountOrZero, WORK] = Field(
        5, description="solved examples in each prompt; a task that says 0 itself keeps it"
    )
    num_questions: Annotated[Count, WORK] = Field(
        description="how many questions are asked, the same ones in each run; of a task that has more, `seed` draws them"
    )
    num_concurrent: Annotated[Count | None, EFFORT] = Field(
        None, description="requests under way at one time; none follows the server's `max-num-seqs`, up to 256, or is 64"
    )
    max_gen_toks: Annotated[Count | None, WORK] = Field(
        None, description="longest reply, with its thinking; by default a length of the task's own, or else 256"
    )
    stop: Annotated[list[Text] | None, WORK] = Field(
        None,
        max_length=4,
        description="texts that end a reply, in place of the task's own, which are for completions: in a chat they also end it"
        " while the model thinks. With [] it ends where the model ends it",
    )
    sampling: Annotated[Sampling | Literal["model"] | None, WORK] = Field(
        None,
        description="how tokens are chosen; `model` takes the numbers of the model's generation_config.json and of"
        " `override-generation-config`. Without it the task itself says so, and most say the likeliest token",
    )
    system_prompt: Annotated[Text | None, WORK] = Field(
        None, description="of a chat: the system's turn, before the task's own words"
    )
    chat_template_kwargs: Annotated[dict[Text, TemplateValue], WORK] = Field(
        {}, description="what a chat's template is given, like `enable_thinking: true`"
    )
    reasoning_effort: Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None, WORK] = Field(
        None, description="how long a model thinks in a chat, where its template has that"
    )
    think_end: Annotated[Text | None, WORK] = Field(
        None, description="the text that ends a model's thinking, like `</think>`, where the server does not split it off"
    )
    seed: Annotated[CountOrZero, WORK] = Field(
        1234, description="of lm-eval, and of which questions are asked; where answers are sampled, of these too"
    )
    samples_per_question: Annotated[Count, EFFORT] = Field(
        1,
        description="how often each question is asked at least, where answers are sampled; the score is the mean of the"
        " questions' means (pass@1). Above 1, nothing is decided before all were asked so often",
    )
    most_repetitions: Annotated[Count, EFFORT] = Field(
        10,
        description="how often all questions are asked at most in one start of the server, where a gate compares with a"
        " baseline; then 4 or more",
    )
    sequential: Annotated[Flag, EFFORT] = Field(
        True, description="end as soon as every gate on the task is decided; a run that becomes a baseline asks everything"
    )
    max_unanswered: Annotated[Share, EFFORT] = Field(
        0.002, description="a larger share of empty replies makes the task `invalid`; fewer count as wrong answers"
    )
    time_limit_s: Annotated[Seconds, EFFORT] = Field(
        3600.0, description="for each block of questions: a fifth of them, or without `sequential` all"
    )
    published: Annotated[list[PublishedScore], NOTE] = Field(
        [],
        max_length=20,
        description="scores that others published, shown beside ours with what differs in the asking; they gate nothing",
    )
    questions: Annotated[Questions | None, PLACE] = Field(None, description="local files in place of the task's own data")
    task_folder: Annotated[Text | None, PLACE] = Field(
        None,
        description="a folder with lm-eval's YAML files of own tasks, and all files that they open: no others are readable",
    )

    @property
    def context_tok(self) -> int | None:
        """How many tokens prompt and reply have, if the task is one that this project makes in that length."""
        named = None if self.task_folder else LONG.fullmatch(self.task)
        return int(named[1]) if named else None

    @property
    def long_reply_tok(self) -> int:
        """The most tokens of a reply to a question of such a task."""
        return self.max_gen_toks or LONG_REPLY_TOK

    @model_validator(mode="after")
    def _has_room_for_questions(self) -> Self:
        tokens = self.context_tok
        if tokens is None:
            return self
        if not LEAST_CONTEXT_TOK <= tokens <= MOST_CONTEXT_TOK or self.task != f"long_{tokens}":
            raise ValueError(f"name it long_{LEAST_CONTEXT_TOK} to long_{MOST_CONTEXT_TOK}, by the tokens of prompt and reply")
        if self.questions:
            raise ValueError(f"{self.task} makes its own questions: leave 'questions' out")
        if tokens - self.long_reply_tok < LEAST_LONG_PROMPT_TOK:
            raise ValueError(
                f"{self.task} and a reply of {self.long_reply_tok:,} tokens leave less than {LEAST_LONG_PROMPT_TOK} for the"
                " prompt: name a longer context, or lower 'max_gen_toks'"
            )
        return self

    @model_validator(mode="after")
    def _only_samples_differ(self) -> Self:
        if self.samples_per_question == 1:
            return self
        if self.sampling is None or (isinstance(self.sampling, Sampling) and self.sampling.is_greedy):
            raise ValueError("'samples_per_question' is of sampled answers: give 'sampling' with a temperature above 0")
        if self.samples_per_question > self.most_repetitions:
            raise ValueError("'samples_per_question' is more than 'most_repetitions': raise that too")
        return self

    @model_validator(mode="after")
    def _chats_alone_have_a_template(self) -> Self:
        of_chats = {name: getattr(self, name) for name in ("system_prompt", "chat_template_kwargs", "reasoning_effort")}
        if self.api != "chat" and (given := next((name for name, value in of_chats.items() if value), None)):
            raise ValueError(f"'{given}' is of chats: set 'api: chat', or leave it out")
        if taken := sorted({"chat_template", "tokenize"} & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{taken[0]} is the server's own: servers refuse it in requests")
        return self


class Likelihood(Settings):
    """How likely the server finds the baseline's answers, and texts of the recipe's own. Nothing is generated for it.

    A run that is made to be a baseline scores its own answers.
    """

    num_answers: Annotated[Count, EFFORT] = Field(
        500, description="of each task that generates text, how many of the baseline's answers are scored at most"
    )
    texts: Annotated[Text | None, PLACE] = Field(
        None, description="path of texts to be scored too: JSON lines, each with a `text`"
    )
    time_limit_s: Annotated[Seconds, EFFORT] = Field(
        300.0, description="for each request; an engine compiles a kernel at the first one"
    )
