"""Chats: the messages of rows and clients, and the template that turns them into tokens.

Every reader of a chat uses this package: prompts of `train` and `eval`, answers of `sft`, agents,
the gateway, judges and classifiers. So one row gives the same tokens wherever it is read.
"""
