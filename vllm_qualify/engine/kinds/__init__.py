"""Kinds of engine, one file for each; `engine.kind` lists them."""
