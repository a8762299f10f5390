"""The hosts of a run and their processes; all code that uses Ray, imported when a session begins."""
