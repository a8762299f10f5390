"""`onpolicy report` and `onpolicy episodes`: HTML pages that open without a network."""
