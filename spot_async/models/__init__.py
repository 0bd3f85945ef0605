"""Reads model directories: files, vocabulary, end tokens; and knows which output row decides which token.

It loads no weights and runs no model.
"""
