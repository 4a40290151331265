"""What the documentation site has beside the pages of docs/: made at each build, by `make docs`.

names       the public names, read from the doors of the packages
pages       the reference, the commands, the examples and the notebooks as Markdown
hooks       where MkDocs asks for them
"""
