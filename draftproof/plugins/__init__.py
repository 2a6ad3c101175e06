"""Files that travel to an engine's machine and run inside the engine. They import nothing of draftproof."""
