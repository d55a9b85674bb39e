"""Conversations to train and to check the chat model on: sums, word problems, notes, tools, JSON, and rules of a system prompt.

A conversation is a list of OpenAI's messages. Its last one is the reply to learn. The reply, its thoughts included, follows
from what stands before it, so that it can be checked token by token. All words and numbers are drawn from a seed. Words that
the generator makes up from syllables stand among the real ones: the model has to copy what it reads.

No conversation can be both in a check and in training: a hash of all that stands before the reply sends it to one side, and
each word problem by the hash of its question (`problems.py`). Greetings are too few to hold some out.
"""

import hashlib
import json
import operator
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "reference_model"))

from problems import HELD_OUT_SHARE, MAX_VALUE, NAMES, TEMPLATES, THINGS, Split, split_of

Message = dict[str, Any]
Talk = random.Random

CITIES = (
    "Paris",
    "Rome",
    "Oslo",
    "Berlin",
    "Madrid",
    "London",
    "Tokyo",
    "Cairo",
    "Lima",
    "Delhi",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Athens",
    "Prague",
    "Bern",
    "Boston",
    "Chicago",
    "Sydney",
    "Beijing",
)
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "pink")
ANIMALS = ("cat", "dog", "horse", "mouse", "owl", "fox", "bear", "frog")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy")
WORDS = (
    *THINGS,
    *COLOURS,
    *ANIMALS,
    *SKIES,
    "over",
    "indeed",
    "well",
    "listen",
    "friend",
    "please",
    "done",
    "yes",
    "no",
    "hello",
    "world",
)
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
NONCE_SHARE = 0.15
NEUTRAL = (
    "You are a helpful assistant.",
    "You are a careful assistant.",
    "You help people with sums and words.",
    "Answer briefly.",
    "Be kind.",
    "Think before you answer.",
    "Use the tools when you need them.",
    "Today is a good day.",
    "Do not make up facts.",
    "People ask you about numbers, cities and things.",
    "You work for a shop.",
    "Be exact.",
)


@dataclass(frozen=True)
class Reply:
    """What the model says: `short` is its text after thinking, `full` its text without; or the tools that it calls."""

    thoughts: str
    short: str = ""
    full: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Exchange:
    """A user's message and what follows it: replies, and between them the tools' results."""

    user: str
    replies: tuple[Reply, ...]
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    topic: str
    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]

    def document(self) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in self.parameters}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties},
        }
        return {"type": "function", "function": function}


@dataclass
class State:
    """What was said so far."""

    tools: list[Tool] = field(default_factory=list)
    begin: str = ""
    end: str = ""
    own_name: str = "reference-chat"
    notes: dict[str, str] = field(default_factory=dict)
    value: int | None = None

    def tool(self, topic: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.topic == topic), None)

    def styled(self, text: str) -> str:
        if not text or text.startswith("{"):
            return text
        return " ".join(part for part in (self.begin, text, self.end) if part)


@dataclass(frozen=True)
class Conversation:
    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    thinking: bool
    reply: str  # as the model writes it, thoughts and tags included
    trained: bool


# Words


def nonce(rng: Talk) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))) + rng.choice(("", "", "n", "x"))


def word(rng: Talk, words: tuple[str, ...]) -> str:
    """One of the words, or a made-up one that is written like them."""
    if rng.random() >= NONCE_SHARE:
        return rng.choice(words)
    return nonce(rng).capitalize() if words[0][0].isupper() else nonce(rng)


def distinct(rng: Talk, words: tuple[str, ...], count: int) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        if (new := word(rng, words)) not in chosen:
            chosen.append(new)
    return chosen


# Exchanges without a tool


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(frozen=True)
class Sum:
    left: int
    sign: str
    right: int

    @property
    def value(self) -> int:
        return OPERATIONS[self.sign](self.left, self.right)

    @property
    def spaced(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    @property
    def thoughts(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.value}"

    @property
    def reply(self) -> Reply:
        text = f"{self.spaced} = {self.value}."
        return Reply(self.thoughts, text, text)


def draw_sum(rng: Talk, left: int | None = None) -> Sum:
    """A sum of whole numbers; they and its value are in 0..MAX_VALUE; `left` is given where a sum goes on from one before."""
    while True:
        sign = rng.choice("++--*/")
        if sign in "+-":
            found = Sum(rng.randint(0, 120) if left is None else left, sign, rng.randint(0, 100 if left is None else 20))
        elif sign == "*":
            found = Sum(rng.randint(0, 20) if left is None else left, sign, rng.randint(0, 12 if left is None else 5))
        else:
            by, each = rng.randint(1, 12), rng.randint(0, 20)
            found = Sum(by * each if left is None else left, sign, by)
        if 0 <= found.value <= MAX_VALUE and found.left <= MAX_VALUE and (sign != "/" or found.left % found.right == 0):
            return found


IN_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
ASKED = ("What is {}?", "How much is {}?", "Compute {}.", "{} = ?", "Please calculate {}.", "Tell me {}.", "What does {} make?")


def written(rng: Talk, drawn: Sum) -> str:
    return rng.choice(
        (
            drawn.spaced,
            drawn.spaced,
            f"{drawn.left}{drawn.sign}{drawn.right}",
            f"{drawn.left} {IN_WORDS[drawn.sign]} {drawn.right}",
        )
    )


def sum_(rng: Talk, state: State) -> Exchange:
    drawn = draw_sum(rng)
    state.value = drawn.value
    return Exchange(rng.choice(ASKED).format(written(rng, drawn)), (drawn.reply,))


GOES_ON = {
    "+": ("Add {} to that.", "Plus {}?", "And plus {}?", "Now add {}.", "What is that plus {}?"),
    "-": ("Subtract {} from that.", "Minus {}?", "Now take away {}.", "What is that minus {}?"),
    "*": ("Multiply that by {}.", "Times {}?", "What is that times {}?"),
    "/": ("Divide that by {}.", "Divided by {}?", "What is that divided by {}?"),
}


def follow_up(rng: Talk, state: State) -> Exchange:
    assert state.value is not None
    drawn = draw_sum(rng, state.value)
    state.value = drawn.value
    if drawn.sign == "*" and drawn.right == 2 and rng.random() < 0.5:
        return Exchange("Double that.", (drawn.reply,))
    return Exchange(rng.choice(GOES_ON[drawn.sign]).format(drawn.right), (drawn.reply,))


def problem(rng: Talk, state: State) -> Exchange:
    drawn = rng.choice(TEMPLATES)(rng)
    steps, _, value = drawn["answer"].rpartition("\n#### ")
    state.value = int(value)
    user = f"Question: {drawn['question']}\nAnswer:" if rng.random() < 0.7 else drawn["question"]
    return Exchange(user, (Reply(steps, f"The answer is {value}.\n#### {value}", drawn["answer"]),))


def count(rng: Talk, _: State) -> Exchange:
    first = 1 if rng.random() < 0.5 else rng.randint(1, 40)
    last = first + rng.randint(1, 20)
    user = f"Count to {last}." if first == 1 and rng.random() < 0.5 else f"Count from {first} to {last}."
    text = ", ".join(str(n) for n in range(first, last + 1))
    return Exchange(user, (Reply(f"From {first} to {last}.", text, text),))


def repeat(rng: Talk, _: State) -> Exchange:
    text = " ".join(word(rng, rng.choice((WORDS, CITIES, NAMES))) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.2:
        text = " ".join(str(rng.randint(0, MAX_VALUE)) for _ in range(rng.randint(1, 5)))
    user = rng.choice(("Repeat: {}", "Repeat after me: {}", "Say: {}", "Say {}", "Echo: {}", "Repeat the words: {}")).format(
        text
    )
    return Exchange(user, (Reply("I repeat it.", text, text),))


def greeting(rng: Talk, state: State) -> Exchange:
    users, thoughts, text = rng.choice(
        (
            (
                ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there"),
                "The user greets me.",
                "Hello! How can I help?",
            ),
            (("Thank you", "Thanks", "Thank you very much"), "The user thanks me.", "You are welcome."),
            (("Goodbye", "Bye", "See you"), "The user leaves.", "Goodbye!"),
            (("How are you?", "How do you do?"), "The user asks how I am.", "I am well."),
            (
                ("Who are you?", "What is your name?", "Tell me your name."),
                "The user asks who I am.",
                f"I am {state.own_name}.",
            ),
        )
    )
    user = rng.choice(users)
    return Exchange(user if user[-1] in "?." else user + rng.choice(("", "!", ".")), (Reply(thoughts, text, text),))


# what is noted: how a user says it, how it is asked for, and the reply
NOTES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "name": (
        ("My name is {}.", "I am {}.", "I am called {}.", "Hello, my name is {}."),
        ("What is my name?", "Who am I?", "Do you know my name?"),
        "Your name is {}.",
    ),
    "city": (
        ("I live in {}.", "My home is in {}.", "I am from {}."),
        ("Where do I live?", "Which city do I live in?", "Where am I from?"),
        "You live in {}.",
    ),
    "colour": (
        ("My favourite colour is {}.", "I like the colour {}."),
        ("What is my favourite colour?", "Which colour do I like?"),
        "Your favourite colour is {}.",
    ),
    "animal": (("I have a {}.", "My pet is a {}."), ("What pet do I have?", "Which animal do I have?"), "You have a {}."),
    "number": (
        ("Remember the number {}.", "My number is {}.", "The number is {}."),
        ("What is the number?", "Which number did I give you?", "What is my number?"),
        "The number is {}.",
    ),
    "word": (
        ("Remember the word {}.", "The password is {}.", "The secret word is {}."),
        ("What is the word?", "What is the password?", "Which word did I give you?"),
        "The word is {}.",
    ),
}


def noted(rng: Talk, topic: str) -> str:
    if topic == "number":
        return str(rng.randint(0, MAX_VALUE))
    return word(rng, {"name": NAMES, "city": CITIES, "colour": COLOURS, "animal": ANIMALS, "word": WORDS}[topic])


def note(rng: Talk, state: State) -> Exchange:
    topic = rng.choice([topic for topic in NOTES if topic not in state.notes] or list(NOTES))
    state.notes[topic] = noted(rng, topic)
    text = f"Noted: {state.notes[topic]}."
    return Exchange(
        rng.choice(NOTES[topic][0]).format(state.notes[topic]), (Reply(f"The {topic} is {state.notes[topic]}.", text, text),)
    )


def recall(rng: Talk, state: State) -> Exchange:
    topic = rng.choice(list(state.notes))
    text = NOTES[topic][2].format(state.notes[topic])
    return Exchange(rng.choice(NOTES[topic][1]), (Reply(f"The {topic} is {state.notes[topic]}.", text, text),))


def unknown(rng: Talk, state: State) -> Exchange:
    topic = rng.choice([topic for topic in NOTES if topic not in state.notes] or ["name"])
    if topic in state.notes:
        return recall(rng, state)
    return Exchange(rng.choice(NOTES[topic][1]), (Reply(f"The {topic} was not said.", "I do not know.", "I do not know."),))


def json_(rng: Talk, state: State) -> Exchange:
    return rng.choice((_listed, _described, _described, _summed))(rng, state)


IN_JSON = ("Reply in JSON with", "Answer as JSON with", "Give a JSON object with", "Write JSON with")


def _object(pairs: dict[str, Any]) -> tuple[Reply, ...]:
    text = json.dumps(pairs)
    return (Reply("I write JSON.", text, text),)


def _key_list(keys: list[str]) -> str:
    if len(keys) == 1:
        return f"the key {keys[0]}"
    return "the keys " + ", ".join(keys[:-1]) + " and " + keys[-1]


KEYS = (
    "name",
    "age",
    "city",
    "colour",
    "animal",
    "price",
    "item",
    "count",
    "answer",
    "result",
    "value",
    "unit",
    "title",
    "size",
)


def _listed(rng: Talk, _: State) -> Exchange:
    pairs: dict[str, Any] = {}
    for key in distinct(rng, KEYS, rng.randint(1, 4)):
        pairs[key] = rng.randint(0, MAX_VALUE) if rng.random() < 0.4 else word(rng, rng.choice((WORDS, CITIES, NAMES)))
    told = ", ".join(f"{key} {value}" for key, value in pairs.items())
    return Exchange(f"{rng.choice(IN_JSON)} {told}.", _object(pairs))


def _described(rng: Talk, _: State) -> Exchange:
    name, city, age = word(rng, NAMES), word(rng, CITIES), rng.randint(1, 99)
    colour, animal = word(rng, COLOURS), word(rng, ANIMALS)
    told = {"age": f"is {age} years old", "city": f"lives in {city}", "colour": f"likes {colour}", "animal": f"has a {animal}"}
    values: dict[str, Any] = {"name": name, "age": age, "city": city, "colour": colour, "animal": animal}
    said = rng.sample(list(told), rng.randint(1, 3))
    keys = rng.sample(["name", *said], rng.randint(1, len(said) + 1))
    sentence = f"{name} " + " and ".join(told[key] for key in said) + "."
    return Exchange(f"{sentence} {rng.choice(IN_JSON)} {_key_list(keys)}.", _object({key: values[key] for key in keys}))


def _summed(rng: Talk, state: State) -> Exchange:
    drawn, key = draw_sum(rng), word(rng, KEYS)
    state.value = drawn.value
    text = json.dumps({key: drawn.value})
    user = f"{rng.choice(ASKED).format(written(rng, drawn))} {rng.choice(IN_JSON)} {_key_list([key])}."
    return Exchange(user, (Reply(drawn.thoughts, text, text),))


# Tools


LOOKUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # topic: names of its parameter, what it is asked of, how it is asked
    "weather": (
        ("city", "location", "place", "town"),
        CITIES,
        (
            "What is the weather in {}?",
            "How is the weather in {}?",
            "What is the weather like in {}?",
            "Tell me the weather in {}.",
            "What is the weather in {} today?",
            "I need the weather in {}.",
        ),
    ),
    "time": (
        ("city", "location", "place", "town"),
        CITIES,
        ("What time is it in {}?", "What is the time in {}?", "Tell me the time in {}.", "I need the time in {}."),
    ),
    "population": (
        ("city", "location", "place", "town"),
        CITIES,
        ("How many people live in {}?", "What is the population of {}?", "Tell me the population of {}."),
    ),
    "price": (
        ("item", "product", "thing", "article"),
        THINGS,
        ("What is the price of {}?", "How much do {} cost?", "What do {} cost?", "Tell me the price of {}."),
    ),
    "stock": (
        ("item", "product", "thing", "article"),
        THINGS,
        ("How many {} are in stock?", "What is the stock of {}?", "Tell me the stock of {}."),
    ),
    "age": (("name", "person", "who"), NAMES, ("How old is {}?", "What is the age of {}?", "Tell me the age of {}.")),
    "phone": (
        ("name", "person", "who"),
        NAMES,
        ("What is the phone number of {}?", "Tell me the phone number of {}.", "How can I phone {}?"),
    ),
}
VERBS = ("get", "get", "get", "fetch", "find", "look_up", "read", "query", "check", "get_current")
ARITHMETIC = {
    "+": ("add", "add_numbers", "sum", "plus", "calc_add"),
    "-": ("subtract", "subtract_numbers", "minus", "difference"),
    "*": ("multiply", "multiply_numbers", "times", "product"),
    "/": ("divide", "divide_numbers", "quotient"),
}
PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
CALCULATORS = ("calculator", "calculate", "compute", "evaluate")
UNITS = ("celsius", "fahrenheit")


def draw_tool(rng: Talk, topic: str) -> Tool:
    if topic in LOOKUPS:
        name = rng.choice(
            (f"{rng.choice(VERBS)}_{topic}", f"{rng.choice(VERBS)}_{topic}", topic, f"{topic}_of", f"{topic}_lookup")
        )
        parameters = [(rng.choice(LOOKUPS[topic][0]), "string")]
        if topic == "weather" and rng.random() < 0.3:
            parameters.append((rng.choice(("unit", "units")), "string"))
        description = rng.choice(
            (
                "",
                f"Get the {topic}.",
                f"The current {topic}.",
                f"Returns the {topic} of one {parameters[0][0]}.",
                f"Look up the {topic} of a {parameters[0][0]}.",
            )
        )
        return Tool(topic, name, description, tuple(parameters))
    if topic in ARITHMETIC:
        kind = rng.choice(("integer", "integer", "number"))
        description = rng.choice(("", f"Computes {topic}.", "Does a sum with two numbers.", f"{IN_WORDS[topic].capitalize()}."))
        return Tool(topic, rng.choice(ARITHMETIC[topic]), description, tuple((name, kind) for name in rng.choice(PAIRS)))
    if topic == "calculator":
        return Tool(
            topic,
            rng.choice(CALCULATORS),
            rng.choice(("", "Computes an expression.", "Does sums.")),
            ((rng.choice(("expression", "sum", "input")), "string"),),
        )
    names = distinct(rng, ("value", "text", "key", "number", "item", "target", "query", "level"), rng.randint(1, 2))
    name = rng.choice(
        (
            nonce(rng),
            f"{nonce(rng)}_{nonce(rng)}",
            f"{rng.choice(VERBS)}_{nonce(rng)}",
            f"set_{rng.choice(WORDS)}",
            f"send_{rng.choice(WORDS)}",
        )
    )
    return Tool(
        topic,
        name,
        rng.choice(("", "A tool.", "Does something.")),
        tuple((n, rng.choice(("string", "integer"))) for n in names),
    )


def draw_tools(rng: Talk, topic: str | None) -> list[Tool]:
    """One to three tools of different topics and names, one of them of the topic if one is given."""
    others = [
        *LOOKUPS,
        *(sign for sign in ARITHMETIC if topic != "calculator"),
        *(["calculator"] if topic not in ARITHMETIC else []),
        "any",
    ]
    topics = [topic] if topic else []
    for other in rng.sample(others, rng.choice((0, 1, 1, 2)) if topic else rng.randint(1, 3)):
        clash = (other == "calculator" and set(topics) & set(ARITHMETIC)) or (other in ARITHMETIC and "calculator" in topics)
        if other not in topics and not clash:
            topics.append(other)
    rng.shuffle(topics)
    tools = [draw_tool(rng, each) for each in topics]
    return tools if len({tool.name for tool in tools}) == len(tools) else draw_tools(rng, topic)


@dataclass(frozen=True)
class Call:
    tool: Tool
    subject: str
    arguments: dict[str, Any]
    result: str


def draw_result(rng: Talk, topic: str) -> str:
    number = rng.randint(0, MAX_VALUE)
    if rng.random() < 0.05:
        return rng.choice(("error: not found", '{"error": "not found"}', '{"error": "timeout"}'))
    if topic == "weather":
        sky, degrees = rng.choice(SKIES), rng.randint(0, 40)
        pairs: list[tuple[str, Any]] = [
            (rng.choice(("temperature", "temp", "degrees", "temperature_c")), degrees),
            (rng.choice(("sky", "condition", "conditions", "weather", "forecast")), sky),
        ]
        rng.shuffle(pairs)
        return rng.choice(
            (
                f"{sky}",
                f"{degrees} degrees and {sky}",
                f"{sky}, {degrees} degrees",
                *[json.dumps(dict(pairs[: rng.randint(1, 2)]))] * 4,
            )
        )
    if topic == "time":
        time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return rng.choice((time, json.dumps({"time": time})))
    if topic in LOOKUPS:
        plain = str(number)
        pairs = [(rng.choice((topic, "value", "result", "answer", "count")), number)]
        if topic == "price":
            plain += " dollars"
            pairs.append((rng.choice(("currency", "unit")), "dollars"))
        return rng.choice((plain, json.dumps(dict(pairs))))
    value = rng.choice((number, word(rng, WORDS)))
    return rng.choice((str(value), json.dumps({word(rng, ("status", "result", "value", "answer", "state")): value})))


def said(result: str) -> str:
    """A tool's result as a sentence, without its full stop: the pairs of an object, or the text."""
    if not result.startswith("{"):
        return f"the result is {result}"
    return ", ".join(f"the {key} is {value}" for key, value in json.loads(result).items())


def sentences(calls: list[Call]) -> str:
    if len(calls) == 1:
        text = said(calls[0].result)
        return f"T{text[1:]}."
    return " ".join(f"{call.subject}: {said(call.result)}." for call in calls)


def used(user: str, calls: list[Call]) -> Exchange:
    names = " and ".join(call.tool.name for call in calls)
    asks = Reply(f"I call {names}.", calls=tuple((call.tool.name, call.arguments) for call in calls))
    text = sentences(calls)
    return Exchange(
        user,
        (asks, Reply("I have the result." if len(calls) == 1 else "I have the results.", text, text)),
        tuple(call.result for call in calls),
    )


def lookup_topic(rng: Talk, state: State) -> str:
    return rng.choice([tool.topic for tool in state.tools if tool.topic in LOOKUPS])


def tool(rng: Talk, state: State) -> Exchange:
    """One call of a tool that fits."""
    state.value = None
    chosen = rng.choice(state.tools)
    if chosen.topic in LOOKUPS:
        subject = word(rng, LOOKUPS[chosen.topic][1])
        user = rng.choice(LOOKUPS[chosen.topic][2]).format(subject)
        arguments: dict[str, Any] = {chosen.parameters[0][0]: subject}
        if len(chosen.parameters) == 2 and rng.random() < 0.6:
            arguments[chosen.parameters[1][0]] = unit = rng.choice(UNITS)
            user += rng.choice((f" In {unit}.", f" Use {unit}.", f" Give it in {unit}."))
        return used(user, [Call(chosen, subject, arguments, draw_result(rng, chosen.topic))])
    if chosen.topic == "any":
        return _told_to_call(rng, chosen)
    drawn = draw_sum(rng)
    while chosen.topic in ARITHMETIC and drawn.sign != chosen.topic:
        drawn = draw_sum(rng)
    result = rng.choice((str(drawn.value), json.dumps({rng.choice(("result", "value", "answer", "sum")): drawn.value})))
    numbers = (drawn.left, drawn.right)
    arguments = (
        {name: number for (name, _), number in zip(chosen.parameters, numbers, strict=True)}
        if chosen.topic in ARITHMETIC
        else {chosen.parameters[0][0]: drawn.spaced}
    )
    return used(rng.choice(ASKED).format(written(rng, drawn)), [Call(chosen, drawn.spaced, arguments, result)])


def _told_to_call(rng: Talk, chosen: Tool) -> Exchange:
    arguments: dict[str, Any] = {
        name: rng.randint(0, MAX_VALUE) if kind == "integer" else word(rng, rng.choice((WORDS, CITIES, NAMES)))
        for name, kind in chosen.parameters
    }
    form = rng.choice(("{} {}", "{} {}", "{}={}", "{}: {}"))
    told = rng.choice((" and ", ", ")).join(form.format(name, value) for name, value in arguments.items())
    user = rng.choice(("Call {} with {}.", "Use {} with {}.", "Call the tool {} with {}.", "Please run {} with {}.")).format(
        chosen.name, told
    )
    return used(user, [Call(chosen, str(next(iter(arguments.values()))), arguments, draw_result(rng, "any"))])


def tools(rng: Talk, state: State) -> Exchange:
    """Two calls in parallel: of one tool for two subjects, or of two tools."""
    state.value = None
    usable = [each for each in state.tools if each.topic in LOOKUPS]
    if len(usable) >= 2 and rng.random() < 0.5:
        pair = rng.sample(usable, 2)
        subjects = [word(rng, LOOKUPS[each.topic][1]) for each in pair]
        if subjects[0] == subjects[1]:
            return tools(rng, state)
        user = " ".join(
            rng.choice(LOOKUPS[each.topic][2]).format(subject) for each, subject in zip(pair, subjects, strict=True)
        )
    else:
        pair = [rng.choice(usable)] * 2
        subjects = distinct(rng, LOOKUPS[pair[0].topic][1], 2)
        form = rng.choice(LOOKUPS[pair[0].topic][2])
        again = " and in " if " in {}" in form and rng.random() < 0.5 else " and "
        user = form.format(again.join(subjects))
    return used(
        user, [Call(t, s, {t.parameters[0][0]: s}, draw_result(rng, t.topic)) for t, s in zip(pair, subjects, strict=True)]
    )


def no_tool(rng: Talk, state: State) -> Exchange:
    """A question that needs a tool which is not there."""
    topic = rng.choice([topic for topic in LOOKUPS if not state.tool(topic)])
    user = rng.choice(LOOKUPS[topic][2]).format(word(rng, LOOKUPS[topic][1]))
    return Exchange(user, (Reply("I have no tool for this.", "I can not look that up.", "I can not look that up."),))


# Conversations


Maker = Callable[[Talk, State], Exchange]
# kind: its exchange, how often it is drawn, and what must stand before it (an exchange) or be there (a tool)
KINDS: dict[str, tuple[Maker, float]] = {
    "sum": (sum_, 1.0),
    "follow_up": (follow_up, 1.2),
    "problem": (problem, 3.0),
    "count": (count, 0.4),
    "repeat": (repeat, 0.6),
    "greeting": (greeting, 0.4),
    "note": (note, 0.4),
    "recall": (recall, 1.0),
    "unknown": (unknown, 0.3),
    "json": (json_, 1.0),
    "tool": (tool, 1.2),
    "tools": (tools, 1.2),
    "tool_result": (tool, 0.8),
    "tools_result": (tools, 0.8),
    "no_tool": (no_tool, 0.3),
}
WITH_TOOL = ("tool", "tools", "tool_result", "tools_result")
SUMS: tuple[Maker, ...] = (sum_, problem)
# what may stand before the last exchange
BEFORE: tuple[Maker, ...] = (sum_, count, repeat, greeting, note, note, json_)
TURNS = ((0.5, 0), (0.75, 1), (0.87, 2), (0.94, 3), (0.97, 4), (1.0, 5))


def conversation(rng: Talk, kind: str | None = None, most_before: int = 5) -> Conversation:
    """A conversation whose last reply is of the kind, with at most so many exchanges before it (a kind may need one)."""
    kind = kind or rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    state = State(tools=_tools_for(rng, kind))
    system = _system(rng, state)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    before = min(most_before, next(n for share, n in TURNS if rng.random() <= share))
    exchanges = [make(rng, state) for make in _makers_before(rng, kind, state, before)]
    for exchange in exchanges:
        messages += _said(rng, exchange, state)
    thinking = rng.random() < 0.6
    last = _allowed(KINDS[kind][0], state)(rng, state)
    done = len(last.replies) - 1 if kind.endswith("_result") else 0
    messages += _said(rng, last, state, replies=done)
    documents = [each.document() for each in state.tools]
    texts = [str(message.get("content")) for message in messages]
    trained = all(_trained_question(text) for text in texts) and (
        kind == "greeting" or _is_trained("\n".join([*texts, *(t.name for t in state.tools)]))
    )
    return Conversation(kind, messages, documents, thinking, _written(last.replies[done], state, thinking), trained)


def _tools_for(rng: Talk, kind: str) -> list[Tool]:
    if kind in WITH_TOOL:
        usable = list(LOOKUPS) if kind.startswith("tools") else [*LOOKUPS, *LOOKUPS, *ARITHMETIC, "calculator", "any", "any"]
        return draw_tools(rng, rng.choice(usable))
    if kind in ("sum", "follow_up", "json"):
        return [draw_tool(rng, topic) for topic in rng.sample(list(LOOKUPS), rng.choice((0, 0, 0, 1, 2)))]
    return draw_tools(rng, None) if rng.random() < 0.2 else []


def _allowed(make: Maker, state: State) -> Maker:
    """A sum that a tool would do is not asked without it."""
    counts = any(each.topic in ARITHMETIC or each.topic == "calculator" for each in state.tools)
    return note if counts and make in (sum_, follow_up, json_) else make


def _makers_before(rng: Talk, kind: str, state: State, before: int) -> Iterator[Maker]:
    others = [rng.choice(BEFORE) for _ in range(before)]
    if kind == "problem" and rng.random() < 0.5:
        others = [problem] * before
    if kind in WITH_TOOL and rng.random() < 0.5:
        others = [KINDS[kind][0]] * before
    if kind == "recall":
        others[: max(0, before - 1)] = [rng.choice((note, rng.choice(BEFORE))) for _ in range(max(0, before - 1))]
        place = rng.randrange(max(1, before))
        others[place : place + 1] = [note]
    if kind == "follow_up":
        others = [rng.choice((*BEFORE, follow_up)) for _ in range(max(0, before - 1))]
        others.insert(rng.randint(0, len(others)), rng.choice(SUMS))
    for other in others:
        make = _allowed(other, state)
        yield sum_ if make is follow_up and state.value is None else make


def _said(rng: Talk, exchange: Exchange, state: State, replies: int | None = None) -> list[Message]:
    """The messages of an exchange, the last replies of it left out if `replies` says how many are wanted."""
    wanted = len(exchange.replies) if replies is None else replies
    messages: list[Message] = [{"role": "user", "content": exchange.user}]
    full = rng.random() < 0.5
    for place, reply in enumerate(exchange.replies[:wanted]):
        text = state.styled(reply.full if full else reply.short)
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in reply.calls]
        messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        if place == 0 and exchange.results:
            messages += [{"role": "tool", "content": result} for result in exchange.results]
    return messages


def _written(reply: Reply, state: State, thinking: bool) -> str:
    text = state.styled(reply.short if thinking else reply.full)
    calls = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in reply.calls
    )
    return (f"<think>{reply.thoughts}</think>" if thinking else "") + text + calls


BEGIN = (
    "Begin each reply with {}.",
    "Start every reply with {}.",
    "Always begin your replies with the word {}.",
    "Begin every answer with {}.",
)
END = (
    "End each reply with {}.",
    "Finish every reply with {}.",
    "Always end your replies with the word {}.",
    "End every answer with {}.",
)
CALLED = ("Your name is {}.", "You are called {}.", "You are {}.")
ROBOTS = ("Robo", "Max", "Otto", "Vera", "Nora", "Sam")


def _system(rng: Talk, state: State) -> str:
    if rng.random() < 0.45:
        return ""
    rules = [rng.choice(NEUTRAL) for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8)))]
    if rng.random() < 0.3:
        state.own_name = word(rng, ROBOTS)
        rules.append(rng.choice(CALLED).format(state.own_name))
    if rng.random() < 0.25:
        state.begin = _marked(rng, rules, BEGIN)
    if rng.random() < 0.25:
        state.end = _marked(rng, rules, END)
    rng.shuffle(rules)
    return " ".join(rules)


def _marked(rng: Talk, rules: list[str], forms: tuple[str, ...]) -> str:
    marked = word(rng, WORDS)
    marked = rng.choice((marked, marked, marked.capitalize(), marked.upper()))
    quote = rng.choice(("", "", '"', "'"))
    rules.append(rng.choice(forms).format(f"{quote}{marked}{quote}"))
    return marked


def _trained_question(text: str) -> bool:
    """Whether a message holds no held-out word problem."""
    question = text.removeprefix("Question: ").removesuffix("\nAnswer:")
    return "?" not in question or len(question) < 60 or split_of(question) == "train"


def _is_trained(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >= HELD_OUT_SHARE * 2**32


def conversations(rng: Talk, split: Split, kind: str | None = None, most_before: int = 5) -> Iterator[Conversation]:
    """An endless stream of conversations of one side, drawn from `rng`. Greetings are on both sides."""
    while True:
        drawn = conversation(rng, kind, most_before)
        if drawn.kind == "greeting" or drawn.trained == (split == "train"):
            yield drawn
