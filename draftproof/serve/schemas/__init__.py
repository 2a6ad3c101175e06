"""JSON schemas and tool calls as grammars: checks.py  refuses;  writer.py, calls.py  write rules."""
