"""Images of prompts and turns: from bytes to pixels, and their places among tokens."""
