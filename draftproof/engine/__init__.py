"""Requests through the loop: draft, build the tree, verify, accept, commit."""
