"""Hold one document to one schema within limits of time and memory: a pattern, or a union of schemas, may take for ever.

A process of its own, since nothing else ends a search by a pattern. `{"schema": …, "document": …}` comes on the standard
input, and the seconds of a core as the argument. It writes `{"fault": …, "problem": …}`: the first fault if there is one, or
why the document cannot be held to the schema.
"""

import json
import math
import resource
import sys
import time

from pydantic import JsonValue

from vllm_qualify.recipe.json_schemas import Schema, find_fault

MOST_BYTES = 2 * 2**30
# References may lead further than a schema is nested.
MOST_CALLS = 5000


def main() -> None:
    question = json.load(sys.stdin)
    _set_limits(int(sys.argv[1]))
    json.dump(_find_fault_within_limits(question["schema"], question["document"]), sys.stdout)


def _set_limits(limit_s: int) -> None:
    until_s = math.ceil(time.process_time()) + limit_s
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, until_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MOST_CALLS)


def _find_fault_within_limits(schema: Schema, document: JsonValue) -> dict[str, str | None]:
    try:
        return {"fault": find_fault(schema, document), "problem": None}
    except ValueError as error:
        return {"fault": None, "problem": str(error)}
    except MemoryError:
        return {"fault": None, "problem": f"not within {MOST_BYTES // 2**30} GiB"}


if __name__ == "__main__":
    main()
