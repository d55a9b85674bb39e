"""Kinds of engine, one file for each; `registry` lists them."""
