"""Whether a version of the engine accepts a recipe, asked before anything is served."""
