"""An OpenAI-compatible server on the embedded engine.

app.py      HTTP in, HTTP out: each route                 worker.py  the one thread that owns the engine
asked/      a request of the API -> requests of the engine running.py submitted, followed, broken off
answer/     results of the engine -> the answer            parsers/   text -> reasoning, content, tool calls
grammar.py  forms that an answer is held to (schemas/)     stats/     metrics, log lines
start.py    options -> pair, engine, server                listen.py  socket, signals, the life of the process
"""
