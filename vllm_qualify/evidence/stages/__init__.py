"""The stages of a qualification, a file each. A stage measures into its own folder, and is parsed from there, now or later."""
