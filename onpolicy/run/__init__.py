"""One run: what goes into it, the loop, its verbs, and what it needs to go on later."""
