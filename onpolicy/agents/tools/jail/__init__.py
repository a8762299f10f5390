"""The process in front of a tool's program: takes from it what it may not have, and ends it.

It imports the standard library alone, and is started by `python -I -S`.
"""
