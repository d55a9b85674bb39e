"""Who may decide: a service beside the store, which alone holds the signing key. No GPU host and no flow reaches it."""
