"""The policies of infra/terraform, as they are written."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
from hcl2.utils import SerializationOptions
from mypy_boto3_s3 import S3Client

from tests.s3 import Settings, client_of

FOLDER = Path(__file__).parents[2] / "infra" / "terraform"
PLAIN = SerializationOptions(strip_string_quotes=True, explicit_blocks=False, with_comments=False)

Statement = Mapping[str, Any]


@cache
def parsed(path: Path) -> dict[str, Any]:
    with path.open() as file:
        return dict(hcl2.load(file, serialization_options=PLAIN))


def document(name: str) -> list[Statement]:
    """The statements of a policy as they are written, with those that it takes over and those that a variable adds."""
    documents = [data["aws_iam_policy_document"] for data in parsed(FOLDER / "policies.tf")["data"]]
    [policy] = [data[name] for data in documents if name in data]
    own = policy.get("statement", [])
    added = [content for dynamic in policy.get("dynamic", []) for content in dynamic["statement"]["content"]]
    taken = [source.split(".")[2] for source in policy.get("source_policy_documents", [])]
    return [*own, *added, *(statement for source in taken for statement in document(source))]


def resources(statement: Statement, arn: str = "arn:aws:s3:::bucket") -> list[str]:
    return [name.replace("${local.store}", arn) for name in statement["resources"]]


def allow(owner: S3Client, bucket: str, statements: Sequence[Mapping[str, Any]], user: str) -> None:
    """Allow a user of the gateway these actions on these resources, and nobody anything else."""
    _put_policy(owner, bucket, _for_user(user, statements))


def let(owner: S3Client, bucket: str, user: str, role: str) -> None:
    """Give a user of the gateway a policy of infra/terraform, without what it says of keys."""
    allow(owner, bucket, _statements_of(role, bucket), user)


def let_work(owner: Settings, bucket: str, **roles: str) -> None:
    """Give users of the gateway their policies of infra/terraform.

    An object belongs to whoever wrote it here, so the bucket's owner is allowed to read it; on AWS it belongs to the bucket.
    """
    all_of_it = [{"Action": "s3:*", "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]}]
    granted = [each for user, role in roles.items() for each in _for_user(user, _statements_of(role, bucket))]
    _put_policy(client_of(owner), bucket, [*_for_user("tester", all_of_it), *granted])


def _statements_of(role: str, bucket: str) -> list[Statement]:
    return [
        {"Action": statement["actions"], "Resource": resources(statement, f"arn:aws:s3:::{bucket}")}
        for statement in document(role)
        if "local.store" in str(statement["resources"])
    ]


def _for_user(user: str, statements: Sequence[Statement]) -> list[Statement]:
    return [{**each, "Effect": "Allow", "Principal": {"AWS": [f"arn:aws:iam:::user/{user}"]}} for each in statements]


def _put_policy(owner: S3Client, bucket: str, statements: Sequence[Statement]) -> None:
    owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": statements}))
