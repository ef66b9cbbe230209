"""Answers with the weights of a checkpoint: evaluates, translates, continues texts."""
