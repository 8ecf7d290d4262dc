"""Long texts, of which a model learns the next token."""
