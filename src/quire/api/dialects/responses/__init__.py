"""OpenAI's responses, and where their answers are stored."""
