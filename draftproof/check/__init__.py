"""Will this pair work, on this engine release, as it was trained? Configs and dated data in, findings out."""
