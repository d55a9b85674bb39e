#!/usr/bin/env bash
# xgrammar keeps some keywords of a JSON schema and drops others beside them, without a word.
#
# Version: xgrammar 0.2.8, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): a keyword that the grammar cannot keep is refused when the
#   schema is compiled, as other makers of grammars do.
# Seen: every schema compiles. `minimum`, `multipleOf`, `minItems`, and `enum` beside `anyOf`, are kept. `pattern` beside `enum`, `maxLength` beside `$ref`,
#   `minimum` beside an `allOf` of one part, `not`, `if`, `dependentRequired` and `uniqueItems` are not; and of a schema that has `required` alone, a plain
#   number is a member.
# Why: not looked up.
# Cost to us: "the server keeps JSON schemas" was read from a check with one plain schema. A report now says which one was asked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check xgrammar==0.2.8
cat > "$folder/kept.py" <<'PY'
import json

import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
# Each text does not fit its schema.
ASKED = [
    ("minimum", {"type": "integer", "minimum": 5}, "1", True),
    ("multipleOf", {"type": "integer", "multipleOf": 5}, "7", True),
    ("minItems", {"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1]", True),
    ("enum beside anyOf", {"anyOf": [{"type": "string"}, {"type": "integer"}], "enum": ["x"]}, '"y"', True),
    ("pattern beside enum", {"enum": ["a", "b"], "pattern": "^a$"}, '"b"', False),
    ("maxLength beside $ref", {"$ref": "#/$defs/d", "maxLength": 1, "$defs": {"d": {"type": "string"}}}, '"abc"', False),
    ("minimum beside allOf", {"allOf": [{"type": "integer"}], "minimum": 5}, "1", False),
    ("not", {"type": "object", "properties": NUMBERS, "not": {"required": ["a"]}}, '{"a": 1}', False),
    ("if", {"type": "object", "properties": NUMBERS, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}', False),
    ("dependentRequired", {"type": "object", "properties": NUMBERS, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', False),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", False),
    ("type beside required", {"type": "object", "required": ["a"]}, "7", True),
]
for name, schema, text, is_kept in ASKED:
    kept = not accepts(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)
    print(f"{name}: {'kept' if kept else 'dropped'}")
    assert kept == is_kept, name
# No type is named, so any value fits that is no object. But it is what people write for an object.
assert accepts(xgrammar.Grammar.from_json_schema(json.dumps({"required": ["a"]})), "7")
PY
"$folder/venv/bin/python" "$folder/kept.py" 2>/dev/null
echo "as seen before"
