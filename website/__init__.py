"""What the documentation site has next to the pages of docs/: made at each build, by `make docs`.

names       the public names, read from the packages
docstrings  docstrings as the reference shows them
pages       the reference, the commands, the examples and the notebooks as Markdown
notebooks   the notebooks, run again
hooks       where MkDocs asks for them
"""
