"""How an engine is started exactly: argument lists, never shell strings; here or on another host."""
