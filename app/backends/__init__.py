"""What turns requests into outputs. Only this package knows vLLM's names."""
