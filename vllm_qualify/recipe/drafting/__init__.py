"""A first recipe of a model, by its own small files: what it is, what it needs, and what a release of it must keep."""
