resource "aws_s3_bucket" "store" {
  bucket              = var.bucket
  object_lock_enabled = var.object_lock != null

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_versioning" "store" {
  bucket = aws_s3_bucket.store.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_object_lock_configuration" "store" {
  count  = var.object_lock == null ? 0 : 1
  bucket = aws_s3_bucket.store.id

  rule {
    default_retention {
      mode = var.object_lock.mode
      days = var.object_lock.days
    }
  }

  depends_on = [aws_s3_bucket_versioning.store]
}

resource "aws_s3_bucket_server_side_encryption_configuration" "store" {
  bucket = aws_s3_bucket.store.id

  rule {
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "store" {
  bucket                  = aws_s3_bucket.store.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "store" {
  bucket = aws_s3_bucket.store.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_policy" "store" {
  bucket = aws_s3_bucket.store.id
  policy = data.aws_iam_policy_document.bucket.json

  depends_on = [aws_s3_bucket_public_access_block.store]
}

resource "aws_s3_bucket_lifecycle_configuration" "store" {
  bucket = aws_s3_bucket.store.id

  dynamic "rule" {
    for_each = {
      approvals = "approvals/"
      cells     = "cells/"
      index     = "index.json"
      board     = "index.html"
      order     = "sequences/"
      door      = "pruning.json"
      probe     = ".store.swap"
      releases  = "releases/"

      # What is pruned becomes an earlier version too.
      evidence = "evidence/"
      pruned   = "pruned/"
      reports  = "reports/"
      runs     = "runs/"
      stages   = "stages/"
    }

    content {
      id     = "earlier-versions-of-${rule.key}"
      status = "Enabled"

      filter {
        prefix = rule.value
      }

      noncurrent_version_expiration {
        noncurrent_days = var.noncurrent_days
      }

      expiration {
        expired_object_delete_marker = true
      }
    }
  }

  # Which runs a flow run began: asked for when it is started again, and never later.
  rule {
    id     = "old-attempts"
    status = "Enabled"

    filter {
      prefix = "attempts/"
    }

    expiration {
      days = var.attempt_days
    }

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }
  }

  rule {
    id     = "old-evidence"
    status = "Enabled"

    filter {
      prefix = "evidence/"
    }

    transition {
      days          = var.evidence_transition_days
      storage_class = var.evidence_storage_class
    }
  }

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = var.multipart_days
    }
  }

  depends_on = [aws_s3_bucket_versioning.store]
}
