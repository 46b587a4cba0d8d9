"""The code that people have, with a patch in it: the examples and the libraries around transformers."""
