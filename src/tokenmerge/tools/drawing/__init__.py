"""Pictures from prompts: drawn with any technique, and compared with plain ones."""
