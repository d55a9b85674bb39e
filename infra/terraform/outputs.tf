output "store" {
  description = "What --store takes."
  value       = "s3://${aws_s3_bucket.store.id}"
}

output "policies" {
  description = "The ARNs of the policies, to be attached to roles."
  value = {
    reader    = aws_iam_policy.reader.arn
    publisher = aws_iam_policy.publisher.arn
    watcher   = aws_iam_policy.watcher.arn
    approver  = aws_iam_policy.approver.arn
    pruner    = aws_iam_policy.pruner.arn
  }
}
