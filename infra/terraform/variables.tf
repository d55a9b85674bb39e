variable "bucket" {
  description = "The bucket's name. The store is s3://<bucket>, without a prefix; nothing else should be kept in it."
  type        = string
}

variable "policy_prefix" {
  description = "What the names of the policies begin with."
  type        = string
  default     = "vllm-qualify"
}

variable "kms_key_arn" {
  description = "The KMS key that encrypts the objects; null for keys that S3 keeps (AES256)."
  type        = string
  default     = null
}

variable "object_lock" {
  description = "How long no version of an object can be deleted; null for no lock. Only a new bucket can be given one."
  type = object({
    mode = string
    days = number
  })
  default = null

  validation {
    condition     = var.object_lock == null ? true : contains(["GOVERNANCE", "COMPLIANCE"], var.object_lock.mode)
    error_message = "The mode is GOVERNANCE or COMPLIANCE."
  }

  validation {
    condition     = var.object_lock == null ? true : var.object_lock.days >= 1 && var.object_lock.days <= 36500
    error_message = "The days are 1 to 36500."
  }
}

variable "evidence_storage_class" {
  description = "The storage class to which evidence goes. An archive is none: evidence is read when an approval is verified."
  type        = string
  default     = "STANDARD_IA"

  validation {
    condition     = contains(["STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR"], var.evidence_storage_class)
    error_message = "The class is STANDARD_IA, ONEZONE_IA, INTELLIGENT_TIERING or GLACIER_IR."
  }
}

variable "evidence_transition_days" {
  description = "After how many days evidence goes to that class."
  type        = number
  default     = 90

  validation {
    condition     = var.evidence_transition_days >= 30
    error_message = "At least 30 days, as most of these classes demand."
  }
}

variable "noncurrent_days" {
  description = "For how many days earlier versions of pointers and indexes, and what was pruned, are kept. Each pointer holds its own history."
  type        = number
  default     = 365
}

variable "attempt_days" {
  description = "After how many days it is forgotten which runs a flow run began. A flow run that is started again asks for that."
  type        = number
  default     = 90
}

variable "multipart_days" {
  description = "After how many days the parts of an upload that was never finished are deleted. The store itself begins none."
  type        = number
  default     = 7
}
