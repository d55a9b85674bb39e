"""JSON schemas that a recipe brings: each reply is held to its own by the jsonschema package."""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.directions import OWN_SCHEMAS
from tests.evidence.contract.conftest import Measure
from tests.evidence.contract.server import ALONE, Document, Healthy, keep, sent
from tests.fakes import vllm as fake
from tests.recipes import reference, write
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.contract import own_schemas
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.fitting import find_fault_in_time
from vllm_qualify.plan.gates import contract_of
from vllm_qualify.recipe.contract import Contract, OwnSchema
from vllm_qualify.recipe.json_schemas import MOST_LEVELS, check_schema
from vllm_qualify.recipe.loading import load_recipe

ORDER: Document = {
    "type": "object",
    "properties": {"item": {"type": "string", "minLength": 3}, "count": {"type": "integer", "not": {"const": 7}}},
    "required": ["item", "count"],
    "dependentRequired": {"item": ["count"]},
}
OWN = [
    OwnSchema(name="order", prompt="Order three apples.", json_schema=ORDER),
    OwnSchema(
        name="list",
        prompt="Name two fruits.",
        json_schema={"type": "array", "items": {"$ref": "#/$defs/word"}, "$defs": {"word": {"type": "string"}}},
    ),
]
CONTRACT = ALONE.model_copy(update={"capabilities": ["chat", "json_schema"], "schemas": OWN})
KEPT = {"order": '{"item": "apples", "count": 3}', "list": '["apple", "pear"]'}


def writing(**texts: str) -> type[Healthy]:
    """It writes these texts where the schema of that name is asked for."""

    class Writes(Healthy):
        def speak(self, request: Document) -> Document:
            name = request.get("response_format", {}).get("json_schema", {}).get("name")
            plain = {key: value for key, value in request.items() if key != "response_format"} if name in KEPT else request
            return super().speak(plain) | ({"content": (KEPT | texts)[name]} if name in KEPT else {})

    return Writes


def test_each_schema_is_asked_with_its_prompt_and_kept(measure_server: Measure, folder: Path) -> None:
    rows = measure_server(writing(), CONTRACT)
    assert rows[OWN_SCHEMAS].value == 1.0
    asked = {name: each["body"] for name, each in sent(folder).items() if name.startswith("own_schemas")}
    assert list(asked) == ["own_schemas order", "own_schemas list"]
    body = asked["own_schemas order"]
    assert body["messages"] == [{"role": "user", "content": "Order three apples."}]
    assert body["response_format"]["json_schema"] == {"name": "order", "strict": True, "schema": ORDER}


@pytest.mark.parametrize(
    ("texts", "finding"),
    [
        ({"order": '{"item": "apples", "count": 7}'}, "7 should not be valid under {'const': 7}"),
        ({"order": '{"item": "ap", "count": 3}'}, "'ap' is too short"),
        ({"list": '["apple", 7]'}, "7 is not of type 'string'"),
        ({"list": "apple"}, "is no JSON: 'apple'"),
        ({"list": ""}, "is no JSON: ''"),
    ],
)
def test_a_reply_that_does_not_fit_its_schema_is_told(texts: dict[str, str], finding: str, measure_server: Measure) -> None:
    row = measure_server(writing(**texts), CONTRACT)[OWN_SCHEMAS]
    assert row.value == 0.0
    assert row.finding
    assert f"schema '{next(iter(texts))}'" in row.finding
    assert finding in row.finding


def test_a_schema_that_is_refused_is_told_by_the_servers_words(measure_server: Measure) -> None:
    class Refuses(writing()):  # type: ignore[misc]  # a class that a function makes
        def speak(self, request: Document) -> Document:
            if "response_format" in request and request["response_format"].get("json_schema", {}).get("name") == "order":
                raise fake.FormError("Grammar error: unsupported keyword not")
            spoken: Document = super().speak(request)
            return spoken

    row = measure_server(Refuses, CONTRACT)[OWN_SCHEMAS]
    assert row.value == 0.0
    assert row.finding == "the server refuses the schema 'order', HTTP 400: 'Grammar error: unsupported keyword not'"


class FlatErrors(Healthy):
    """As TensorRT-LLM's."""

    def _talk(self, request: Document) -> None:
        if "response_format" in request:
            self._answer(400, {"object": "error", "message": "no such grammar", "type": "BadRequestError", "code": 400})
        else:
            super()._talk(request)


def answering(status: int, body: Document) -> type[Healthy]:
    """It answers so where a form is asked for."""

    class Answers(Healthy):
        def _talk(self, request: Document) -> None:
            if "response_format" in request:
                self._answer(status, body)
            else:
                super()._talk(request)

    return Answers


@pytest.mark.parametrize(
    ("server", "words"),
    [(FlatErrors, "400: 'no such grammar'"), (answering(422, {"detail": "No"}), """422: '{"detail": "No"}'""")],
)
def test_the_servers_words_are_told_in_whatever_form(server: type[Healthy], words: str, measure_server: Measure) -> None:
    finding = measure_server(server, CONTRACT)[OWN_SCHEMAS].finding
    assert finding == f"the server refuses the schema 'order', HTTP {words}"


@pytest.mark.parametrize("status", [401, 404, 413, 500])
def test_an_error_that_is_no_refusal_is_told_as_one(status: int, measure_server: Measure) -> None:
    row = measure_server(answering(status, {"detail": "No"}), CONTRACT)[OWN_SCHEMAS]
    assert row.finding == f"the request 'own_schemas order' got HTTP {status}: '{{\"detail\": \"No\"}}'"


@pytest.mark.parametrize("status", [408, 429])
def test_a_server_without_time_is_not_judged(status: int, measure_server: Measure) -> None:
    row = measure_server(answering(status, {"error": {"message": "busy", "type": "busy"}}), CONTRACT)[OWN_SCHEMAS]
    assert row.invalid_because == f"the request 'own_schemas order' got HTTP {status}: the server had no time for it"


def test_a_reply_that_is_not_there_is_invalid(measure_server: Measure, folder: Path, tmp_path: Path) -> None:
    measure_server(writing(), CONTRACT)
    kept = keep(tmp_path / "kept", [each for name, each in sent(folder).items() if name != "own_schemas list"])
    rows = {row.metric: row for row in parse_contract(kept, CONTRACT, "reference", KINDS["vllm"])}
    assert rows[OWN_SCHEMAS].invalid_because == "the request 'own_schemas list' was not kept"


def test_without_schemas_there_is_no_such_check(measure_server: Measure) -> None:
    assert OWN_SCHEMAS not in measure_server(Healthy, CONTRACT.model_copy(update={"schemas": []}))


PRICE: Document = {"type": "number", "multipleOf": 0.01}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PRICES: Document = {"$schema": DIALECT, "properties": {"price": {"multipleOf": 0.01}, "child": {"$ref": "#"}}}
EMBEDDED: Document = {"items": {"$ref": "urn:price"}, "$defs": {"price": PRICE | {"$id": "urn:price", "$schema": DIALECT}}}
OLD = {"$id": "urn:old", "$schema": "http://json-schema.org/draft-07/schema#", "items": PRICE}
NODE: Document = {"type": "object", "properties": {"node": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "reply", "finding"),
    [
        (PRICE, "19.99", None),
        (PRICE, "1e300", None),
        (PRICE, "7", None),
        (PRICE, "19.995", "19.995 is not a multiple of 0.01"),
        (PRICES, '{"child": {"price": 19.99}}', None),
        (PRICES, '{"child": {"price": 19.995}}', "$.child.price: 19.995 is not a multiple of 0.01"),
        (EMBEDDED, "[19.99]", None),
        (EMBEDDED, "[19.995]", "19.995 is not a multiple of 0.01"),
        ({"$ref": "urn:old", "$defs": {"old": OLD}}, "[19.99]", None),
        ({"$ref": "urn:old", "$defs": {"old": OLD}}, "[19.995]", "19.995 is not a multiple of 0.01"),
        ({"type": "integer"}, "7.0", None),
        (PRICE, "NaN", "is no JSON: 'NaN'"),
        ({}, '{"far": [-Infinity]}', "is no JSON"),
        ({}, "1e999", "is no JSON"),
        ({"type": "string"}, '["\\ud800"]', "is not of type 'string'"),
        ({"additionalProperties": {"type": "string"}}, '{"\\ud800": 7}', "7 is not of type 'string'"),
        (NODE, '{"node": {"node": {}}}', None),
        (NODE, '{"node": {"leaf": {}}}', "'leaf' was unexpected"),
        ({"type": "string", "format": "date"}, '"not a day"', None),
    ],
)
def test_a_reply_is_held_to_what_a_schema_says(
    schema: Document, reply: str, finding: str | None, measure_server: Measure
) -> None:
    own = [OwnSchema(name="order", prompt="Order.", json_schema=schema)]
    row = measure_server(writing(order=reply), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS]
    assert (row.value, row.invalid_because) == (0.0 if finding else 1.0, None)
    assert (finding or "") in (row.finding or "")
    assert row.model_dump_json()


def test_a_reply_that_is_nested_too_deeply_for_its_schema_is_not_judged(measure_server: Measure) -> None:
    own = [OwnSchema(name="order", prompt="Order.", json_schema=NODE)]
    deep = '{"node": ' * 400 + "{}" + "}" * 400
    row = measure_server(writing(order=deep), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS]
    assert "nested too deeply" in (row.invalid_because or "")


# Each letter more doubles the work, and so does each level.
SENTENCE: Document = {"type": "string", "pattern": r"^([a-z]+\s?)+\.$"}
UNIONS: Document = {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(30)}}
UNIONS["$defs"]["30"] = {"type": "string"}


@pytest.mark.parametrize(("schema", "reply"), [(SENTENCE, json.dumps("a" * 60)), (UNIONS, "7")])
def test_a_reply_that_would_be_judged_for_ever_is_not_judged(
    schema: Document, reply: str, measure_server: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_schemas, "find_fault_in_time", partial(find_fault_in_time, limit_s=1))
    own = [OwnSchema(name="order", prompt="Order.", json_schema=schema)]
    row = measure_server(writing(order=reply), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS]
    assert row.invalid_because == "the reply cannot be held to the schema 'order': not within 1 s"


def test_references_may_lead_further_than_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    chain: Document = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(300)}}
    chain["$defs"]["300"] = {"type": "string"}
    assert find_fault_in_time(chain, 7) == "$: 7 is not of type 'string'"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match="no process starts"):
        find_fault_in_time(chain, 7)


@pytest.mark.parametrize("reply", ['{"node": ' * 400, '{"node": ' * 20_000])
def test_a_deep_reply_that_was_cut_is_no_json(reply: str, measure_server: Measure) -> None:
    own = [OwnSchema(name="order", prompt="Order.", json_schema=NODE)]
    row = measure_server(writing(order=reply), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS]
    assert (row.value, row.invalid_because) == (0.0, None)
    assert "is no JSON" in (row.finding or "")


@pytest.mark.parametrize("reply", ['{"node": ' * 64 + "{}" + "}" * 64, "[" * 100_000 + "]" * 100_000])
def test_a_reply_of_more_levels_than_a_schema_is_not_judged(reply: str, measure_server: Measure) -> None:
    own = [OwnSchema(name="order", prompt="Order.", json_schema={})]
    contract = CONTRACT.model_copy(update={"schemas": own})
    assert "nested too deeply" in (measure_server(writing(order=reply), contract)[OWN_SCHEMAS].invalid_because or "")


def test_brackets_in_a_text_are_no_levels(measure_server: Measure) -> None:
    own = [OwnSchema(name="order", prompt="Order.", json_schema={"type": "array"})]
    reply = json.dumps(["[" * 100 + '"' + "]" * 100, "\\"])
    assert measure_server(writing(order=reply), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS].value == 1.0


# --- the recipe


def loaded_with(folder: Path, **keys: object) -> Contract:
    document: Document = reference() | {"capabilities": ["chat", "json_schema"]} | keys
    loaded = load_recipe(str(write(document, folder / "mine.yaml")))
    contract = contract_of(loaded.recipe, next(iter(loaded.recipe.variants.values())))
    assert contract is not None
    return contract


def test_a_recipe_has_its_schemas_as_they_are_or_in_files(tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text(json.dumps(ORDER))
    named: Document = {"name": "order", "prompt": "Order three apples."}
    for form in (ORDER, "order.json", "./order.json"):
        contract = loaded_with(tmp_path, json_schemas=[named | {"json_schema": form}])
        assert contract.schemas == OWN[:1]
        assert OWN_SCHEMAS in [check.name for check in contract.checks]


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"type": "objekt"}, "is no JSON schema"),
        ({"$ref": "https://example.org/schema.json"}, "refers to what is not in it"),
        ({"$ref": "#/$defs/none"}, "refers to what is not in it: #/$defs/none"),
        ({"$ref": "#/allOf/first", "allOf": [{}]}, "refers to what is not in it: #/allOf/first"),
        ({"$ref": "#/type", "type": "string"}, "refers to what is no schema: #/type"),
        ({"$dynamicRef": "#none"}, "refers to what is not in it: #none"),
        ({"$ref": "#"}, "refers to itself without an end"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/a"}]}}}, "refers to itself without an end"),
        ({"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself without an end"),
        ({"$schema": ["https://json-schema.org/draft/2020-12/schema"]}, "its `$schema` is no text"),
        ({"$schema": 7}, "its `$schema` is no text"),
        ({"const": "\ud800"}, r"has half of a character, \ud800"),
        ({"properties": {"\udfff": {}}}, r"has half of a character, \udfff"),
        ("half.json", r"has half of a character, \ud83d"),
        ({"multipleOf": float("nan")}, "finite number"),
        ({"pattern": "a{99999999999999}"}, "is no JSON schema: a pattern has a number that is too large"),
        ({"patternProperties": {"a{99999999999999}": {}}}, "is no JSON schema"),
        ("deep.json", "is nested too deeply"),
        ("missing.json", "cannot be read"),
        ("~nosuchuser/order.json", "cannot be read"),
        ("~\0x", "is no file with a JSON object"),
        ("~\ud800/x", "is no file with a JSON object"),
        ("broken.json", "is no file with a JSON object"),
        ("pipe.json", "is no file with a JSON object"),
        (".", "is no file with a JSON object"),
        ("nul\0.json", "is no file with a JSON object"),
    ],
)
def test_what_is_no_schema_is_refused(form: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("[1")
    (tmp_path / "half.json").write_text('{"const": "\\ud83d"}')
    (tmp_path / "deep.json").write_text('{"not": ' * MOST_LEVELS + "{}" + "}" * MOST_LEVELS)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CallerError, match=re.escape(problem)) as refused:
        loaded_with(tmp_path, json_schemas=[{"name": "order", "prompt": "Order.", "json_schema": form}])
    assert "json_schemas.0.json_schema" in refused.value.place
    assert str(refused.value).encode()


def nest(levels: int) -> Document:
    return {"not": nest(levels - 1)} if levels > 1 else {}


def call_deeply(calls: int, call: Callable[[], object]) -> None:
    if calls:
        call_deeply(calls - 1, call)
    else:
        call()


@pytest.mark.parametrize("calls", [0, 200])
def test_how_deeply_a_schema_may_be_nested_does_not_depend_on_who_reads_it(calls: int) -> None:
    call_deeply(calls, lambda: check_schema(nest(MOST_LEVELS)))
    with pytest.raises(ValueError, match="is nested too deeply: it has more than 64 levels"):
        call_deeply(calls, lambda: check_schema(nest(MOST_LEVELS + 1)))


@pytest.mark.parametrize(
    "form",
    [
        {"const": {"$ref": "https://example.org/schema.json"}},
        {"enum": [{"$ref": "#/none"}], "default": {"$ref": "#"}},
        {"$ref": "urn:item", "$defs": {"item": {"$id": "urn:item", "type": "string"}}},
        {"$id": "https://example.org/a.json", "$ref": "b.json", "$defs": {"b": {"$id": "b.json", "type": "string"}}},
        {"$ref": "#item", "$defs": {"b": {"$anchor": "item"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"items": {"$ref": "#/definitions/a"}}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"$schema": "https://example.org/own"},
        {"dependencies": {"a": ["b"]}},
        NODE,
    ],
)
def test_what_refers_to_itself_and_what_is_no_reference_is_taken(form: Document, tmp_path: Path) -> None:
    contract = loaded_with(tmp_path, json_schemas=[{"name": "order", "prompt": "Order.", "json_schema": form}])
    assert contract.schemas[0].json_schema == form


def test_a_recipe_that_promises_no_forms_brings_no_schemas(tmp_path: Path) -> None:
    own = [{"name": "order", "prompt": "Order.", "json_schema": ORDER}]
    with pytest.raises(CallerError, match="json_schemas needs json_schema among the capabilities"):
        loaded_with(tmp_path, capabilities=["chat"], json_schemas=own)
    with pytest.raises(CallerError, match="is there more than once"):
        loaded_with(tmp_path, json_schemas=own * 2)
