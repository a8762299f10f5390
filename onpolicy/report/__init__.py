"""`onpolicy report`: one HTML page with the curves of several runs over each other."""
