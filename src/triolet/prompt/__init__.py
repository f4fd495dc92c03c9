"""Text to token ids: tokenizers and chat templates.

Knows the model's tokenizer files. Knows no HTTP, no Trio and no engine.
"""
