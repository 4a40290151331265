"""One module per command of the command line, each with a function `main(arguments)`."""
