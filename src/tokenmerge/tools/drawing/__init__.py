"""Pictures from prompts, plain beside merged or held, and what they show."""
