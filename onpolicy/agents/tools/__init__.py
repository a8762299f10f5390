"""Tools that are safe to call with a policy's text."""
