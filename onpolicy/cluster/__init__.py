"""The hosts of a run and the processes on them; all code that uses Ray, imported when a session
begins."""
