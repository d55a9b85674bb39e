"""JSON schemas that a recipe brings: each reply is held to its own by the jsonschema package."""

import json
from pathlib import Path

import pytest

from tests.directions import OWN_SCHEMAS
from tests.evidence.contract.conftest import Measure
from tests.evidence.contract.server import ALONE, Document, Healthy, keep, sent
from tests.fakes import vllm as fake
from tests.recipes import reference, write
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.plan.gates import contract_of
from vllm_qualify.recipe.contract import Contract, OwnSchema
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


def test_a_deep_reply_to_a_schema_that_contains_itself_is_told(measure_server: Measure) -> None:
    tree: Document = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    own = [OwnSchema(name="order", prompt="Draw a tree.", json_schema=tree)]
    deep = '{"a":' * 400 + "{}" + "}" * 400
    rows = measure_server(writing(order=deep), CONTRACT.model_copy(update={"schemas": own}))
    assert "is nested too deeply to be held to it" in (rows[OWN_SCHEMAS].finding or "")
    assert measure_server(writing(order='{"a": {}}'), CONTRACT.model_copy(update={"schemas": own}))[OWN_SCHEMAS].value == 1.0


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


def test_a_reply_that_is_not_there_is_invalid(measure_server: Measure, folder: Path, tmp_path: Path) -> None:
    measure_server(writing(), CONTRACT)
    kept = keep(tmp_path / "kept", [each for name, each in sent(folder).items() if name != "own_schemas list"])
    rows = {row.metric: row for row in parse_contract(kept, CONTRACT, "reference", KINDS["vllm"])}
    assert rows[OWN_SCHEMAS].invalid_because == "the request 'own_schemas list' was not kept"


def test_without_schemas_there_is_no_such_check(measure_server: Measure) -> None:
    assert OWN_SCHEMAS not in measure_server(Healthy, CONTRACT.model_copy(update={"schemas": []}))


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
        ({"$schema": ["draft-07"]}, r"its \$schema is no text"),
        ({"$ref": "#"}, "refers to itself without an end: #"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself without an end"),
        ({"type": "array", "items": {"$ref": "#/$defs/word"}}, "refers to what is not in it: #/.defs/word"),
        ({"$ref": "#word"}, "refers to what is not in it: #word"),
        ("missing.json", "cannot be read"),
        ("~nobody-of-this-name/schema.json", "cannot be read"),
        ("/dev/zero", "is no JSON object"),
        ("broken.json", "is no JSON object"),
    ],
)
def test_what_is_no_schema_is_refused(form: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("[1")
    with pytest.raises(CallerError, match=problem):
        loaded_with(tmp_path, json_schemas=[{"name": "order", "prompt": "Order.", "json_schema": form}])


def test_a_recipe_that_promises_no_forms_brings_no_schemas(tmp_path: Path) -> None:
    own = [{"name": "order", "prompt": "Order.", "json_schema": ORDER}]
    with pytest.raises(CallerError, match="json_schemas needs json_schema among the capabilities"):
        loaded_with(tmp_path, capabilities=["chat"], json_schemas=own)
    with pytest.raises(CallerError, match="is there more than once"):
        loaded_with(tmp_path, json_schemas=own * 2)
