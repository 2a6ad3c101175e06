"""An OpenAI-compatible server on the embedded engine.

app.py  HTTP in, HTTP out      chat.py  a request of the API -> requests of the engine, results -> its answer
worker.py  the one thread that owns the engine; everything else runs in the event loop
"""
