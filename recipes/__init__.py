"""Recipes for ``tune run``; this file lets ``PYTHONPATH=. tune run recipes/x.py`` find them.

torchtune's wheel installs a top-level package ``recipes`` that refuses to be imported. With the
repository first on the path, this package is found instead.
"""
