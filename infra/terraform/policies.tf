locals {
  store = aws_s3_bucket.store.arn
}

# Who reads: boards, deployments, whoever verifies an approval.
data "aws_iam_policy_document" "reader" {
  statement {
    sid       = "Read"
    actions   = ["s3:GetObject"]
    resources = ["${local.store}/*"]
  }

  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [local.store]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "Decrypt"
      actions   = ["kms:Decrypt"]
      resources = [statement.value]
    }
  }
}

# Who qualifies: reads, and writes evidence, reports, and indexes and board, which follow from reports and pointers.
data "aws_iam_policy_document" "publisher" {
  source_policy_documents = [data.aws_iam_policy_document.reader.json]

  statement {
    sid     = "Write"
    actions = ["s3:PutObject"]
    resources = [
      "${local.store}/attempts/*",
      "${local.store}/cells/*",
      "${local.store}/evidence/*",
      "${local.store}/reports/*",
      "${local.store}/sequences/*",
      "${local.store}/runs/*",
      "${local.store}/stages/*",
      "${local.store}/layout.json",
      "${local.store}/index.html",
      "${local.store}/index.json",
      "${local.store}/.store*",
    ]
  }

  dynamic "statement" {
    for_each = var.object_lock[*]

    content {
      sid     = "Lock"
      actions = ["s3:PutObjectRetention"]
      resources = [
        "${local.store}/attempts/*",
        "${local.store}/evidence/*",
          "${local.store}/reports/*",
        "${local.store}/runs/*",
        "${local.store}/stages/*",
        "${local.store}/layout.json",
        "${local.store}/.store*",
      ]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "Encrypt"
      actions   = ["kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

# Who watches for releases and starts their qualification: publishes, and says which releases are known and who handles them.
# No GPU host: it could take a release before the run that handles it.
data "aws_iam_policy_document" "watcher" {
  source_policy_documents = [data.aws_iam_policy_document.publisher.json]

  statement {
    sid       = "WriteReleases"
    actions   = ["s3:PutObject"]
    resources = ["${local.store}/releases/*"]
  }

  dynamic "statement" {
    for_each = var.object_lock[*]

    content {
      sid       = "LockReleases"
      actions   = ["s3:PutObjectRetention"]
      resources = ["${local.store}/releases/*"]
    }
  }
}

# Who approves and revokes: reads, and writes approvals, and indexes and board. Who also qualifies is given both policies.
data "aws_iam_policy_document" "approver" {
  source_policy_documents = [data.aws_iam_policy_document.reader.json]

  statement {
    sid     = "Write"
    actions = ["s3:PutObject"]
    resources = [
      "${local.store}/approvals/*",
      "${local.store}/cells/*",
      "${local.store}/index.html",
      "${local.store}/index.json",
      "${local.store}/.store*",
    ]
  }

  dynamic "statement" {
    for_each = var.object_lock[*]

    content {
      sid     = "Lock"
      actions = ["s3:PutObjectRetention"]
      resources = [
        "${local.store}/approvals/*",
        "${local.store}/.store*",
      ]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "Encrypt"
      actions   = ["kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

# Who prunes: reads, removes reports and what only they rest on, and writes indexes and board. Never what an approval is made of.
data "aws_iam_policy_document" "pruner" {
  source_policy_documents = [data.aws_iam_policy_document.reader.json]

  statement {
    sid     = "Write"
    actions = ["s3:PutObject"]
    resources = [
      "${local.store}/cells/*",
      "${local.store}/pruned/*",
      "${local.store}/index.html",
      "${local.store}/index.json",
      "${local.store}/pruning.json",
    ]
  }

  statement {
    sid     = "Remove"
    actions = ["s3:DeleteObject"]
    resources = [
      "${local.store}/evidence/*",
      "${local.store}/pruned/*",
      "${local.store}/reports/*",
      "${local.store}/runs/*",
      "${local.store}/stages/*",
    ]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "Encrypt"
      actions   = ["kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

resource "aws_iam_policy" "reader" {
  name   = "${var.policy_prefix}-reader"
  policy = data.aws_iam_policy_document.reader.json
}

resource "aws_iam_policy" "publisher" {
  name   = "${var.policy_prefix}-publisher"
  policy = data.aws_iam_policy_document.publisher.json
}

resource "aws_iam_policy" "watcher" {
  name   = "${var.policy_prefix}-watcher"
  policy = data.aws_iam_policy_document.watcher.json
}

resource "aws_iam_policy" "approver" {
  name   = "${var.policy_prefix}-approver"
  policy = data.aws_iam_policy_document.approver.json
}

resource "aws_iam_policy" "pruner" {
  name   = "${var.policy_prefix}-pruner"
  policy = data.aws_iam_policy_document.pruner.json
}

# What holds for everybody, whatever else they are allowed.
data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyByTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [local.store, "${local.store}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  # Written once: a write must ask that there is no such object.
  statement {
    sid     = "NeverReplaced"
    effect  = "Deny"
    actions = ["s3:PutObject"]
    resources = [
      "${local.store}/attempts/*",
      "${local.store}/evidence/*",
      "${local.store}/releases/claims/*",
      "${local.store}/reports/*",
      "${local.store}/runs/*",
      "${local.store}/stages/*",
      "${local.store}/layout.json",
      "${local.store}/approvals/*/decision.json",
      "${local.store}/approvals/*/approval.json",
      "${local.store}/approvals/*/entry.json",
      "${local.store}/approvals/*/revocation.json",
      "${local.store}/.store",
      "${local.store}/.store-*",
    ]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-none-match"
      values   = ["true"]
    }
  }

  # All the rest, pointers and indexes: a write must also be able to name the version that it replaces.
  statement {
    sid       = "OnlyByCondition"
    effect    = "Deny"
    actions   = ["s3:PutObject"]
    resources = ["${local.store}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-none-match"
      values   = ["true"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-match"
      values   = ["true"]
    }
  }
}
