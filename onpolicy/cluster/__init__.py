"""The hosts of a run and what runs on them: all that knows Ray, imported when a session begins."""
