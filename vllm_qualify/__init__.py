"""Qualify a model for production on vLLM: serve it, check it, measure it, judge it, publish the evidence."""
