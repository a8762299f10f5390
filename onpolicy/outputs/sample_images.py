"""Images of the written samples: their folder, and what stands for one in a text."""

IMAGES = "images"
"""The folder in `samples/`; a file is named by its SHA-256."""

STAND_IN = "\ufffc"
"""The character for an image in a turn's text; where the text has it itself, it is escaped."""
